package engine

import (
	"fmt"
	"math/rand/v2"
)

// Hex16 returns 16 random hexadecimal digits.
func Hex16() string { return fmt.Sprintf("%016x", rand.Uint64()) }

// NewUUID returns a random engine id.
func NewUUID() string {
	a, b := rand.Uint64(), rand.Uint64()
	a = a&^0xF000 | 0x4000
	b = b&^(3<<62) | 2<<62
	return fmt.Sprintf("%08x-%04x-%04x-%04x-%012x", a>>32, a>>16&0xFFFF, a&0xFFFF, b>>48, b&(1<<48-1))
}
