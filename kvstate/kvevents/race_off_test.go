//go:build !race

package kvevents

const raceDetector = false
