package xds

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRisk(t *testing.T) {
	for _, of := range [][3]uint32{{1, 37, 0}, {1, 37, 4}, {1, 38, 2}, {1, 36, 9}} {
		require.Contains(t, risk(of[0], of[1], of[2]), "take 1.37.5, 1.38.3, 1.39 or newer", of)
	}
	for _, of := range [][3]uint32{{1, 37, 5}, {1, 38, 3}, {1, 39, 0}, {1, 40, 0}, {2, 0, 0}} {
		require.Empty(t, risk(of[0], of[1], of[2]), of)
	}
}
