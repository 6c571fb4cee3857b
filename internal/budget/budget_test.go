package budget_test

import (
	"fmt"
	"testing"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

var kept []byte

// fails records whether Allocs would fail a test.
type fails struct {
	testing.TB
	name string
	said string
}

func (f *fails) Name() string                 { return f.name }
func (f *fails) Helper()                      {}
func (f *fails) Errorf(s string, args ...any) { f.said = fmt.Sprintf(s, args...) }
func (f *fails) FailNow()                     { panic(f) }

func saidOf(t *testing.T, name string, atMost float64, run func()) string {
	f := &fails{TB: t, name: name}
	func() {
		defer func() {
			if r := recover(); r != nil && r != any(f) {
				panic(r)
			}
		}()
		budget.Allocs(f, 10, atMost, run)
	}()
	return f.said
}

func TestAllocs(t *testing.T) {
	one := func() { kept = make([]byte, 100) }
	require.Empty(t, saidOf(t, "TestAllocs", 1, one))
	if !budget.Race {
		require.NotEmpty(t, saidOf(t, "TestAllocs", 0, one))
	}
	calls := 0 // other allocations during the first of three averages do not count against f
	require.Empty(t, saidOf(t, "TestAllocs", 0, func() {
		if calls++; calls < 10 {
			one()
		}
	}))
	require.Contains(t, saidOf(t, "TestFast", 0, func() {}), "has Alloc in its name")
}
