//go:build !race

package kvstate

const raceDetector = false
