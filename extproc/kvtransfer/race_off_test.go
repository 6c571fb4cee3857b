//go:build !race

package kvtransfer

const raceDetector = false
