// Rule is one injected failure, in the form of POST /sim/fail.
package fault
