//go:build !race

package scrape

// underRace says that times mean nothing here.
const underRace = false
