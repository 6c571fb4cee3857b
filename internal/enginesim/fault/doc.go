// Package fault holds the failures that a test injects: rules, and which request meets which. Package api carries them out.
package fault
