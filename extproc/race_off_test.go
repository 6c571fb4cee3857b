//go:build !race

package extproc

const raceDetector = false
