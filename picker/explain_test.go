package picker

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every field of a price counts in its sum, is one of its parts, and is printed.
func TestPartsAddUp(t *testing.T) {
	w := Weighed{Name: "e", Transfer: 0.5, Prefill: &PrefillPrice{}, Decode: &DecodePrice{}, Alone: &AlonePrice{}}
	want, names := map[string]float64{}, map[string][]string{"decode": {"transfer"}}
	for name, price := range map[string]any{"prefill": w.Prefill, "decode": w.Decode, "alone": w.Alone} {
		fields := reflect.ValueOf(price).Elem()
		for i := range fields.NumField() {
			fields.Field(i).SetFloat(float64(int(1) << i))
			tag, _, _ := strings.Cut(fields.Type().Field(i).Tag.Get("json"), ",")
			names[name] = append(names[name], tag)
		}
		want[name] = float64(int(1)<<fields.NumField() - 1)
	}
	want["decode"] += w.Transfer
	prefill, decode, alone := w.Totals()
	require.Equal(t, want, map[string]float64{"prefill": prefill, "decode": decode, "alone": alone}, "a sum lacks a field")

	parts := map[string][]Part{}
	parts["prefill"], parts["decode"], parts["alone"] = w.Parts()
	e := Explanation{Candidates: []Weighed{w}}
	var printed bytes.Buffer
	e.Print(&printed)
	for name, of := range parts {
		sum := 0.
		for i, part := range of {
			require.Equal(t, names[name][i], part.Name, "%s: the order and the names of its fields", name)
			sum += part.Value
			require.Contains(t, printed.String(), part.Name+" "+ms(part.Value))
		}
		require.InDelta(t, want[name], sum, 0, name)
	}
}

// Parts that most prices lack are left out where they are 0.
func TestPartsLeaveOutWhatIsRare(t *testing.T) {
	w := Weighed{Name: "e", Decode: &DecodePrice{Step: 0.01}}
	_, parts, _ := w.Parts()
	require.Equal(t, []Part{{"transfer", 0}, {"step", 0.01}, {"answer", 0}, {"overflow", 0}}, parts)
}
