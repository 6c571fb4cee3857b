// Package fault has the failures that a test injects: rules, and the choice of the requests that they hit. Package api
// executes them.
package fault
