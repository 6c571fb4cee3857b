//go:build !race

package redisstore

// underRace says that much work takes too long here.
const underRace = false
