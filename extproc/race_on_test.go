//go:build race

package extproc

// The race detector makes sync.Pool forget at random, so budgets of allocations mean nothing under it.
const raceDetector = true
