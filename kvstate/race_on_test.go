//go:build race

package kvstate

// The race detector allocates by itself, so budgets of allocations mean nothing under it.
const raceDetector = true
