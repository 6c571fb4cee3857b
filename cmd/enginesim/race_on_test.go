//go:build race

package main

// underRace shrinks what the race detector makes slow.
const underRace = true
