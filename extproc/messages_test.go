package extproc

import (
	"slices"

	dto "github.com/prometheus/client_model/go"

	"github.com/stretchr/testify/require"
)

// count sums the values of a metric over the series that have all these label values.
func (s *stand) count(name string, labels ...string) (sum float64) {
	families, err := s.registry.Gather()
	require.NoError(s.t, err)
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			missing := slices.ContainsFunc(labels, func(value string) bool {
				return !slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetValue() == value })
			})
			if !missing {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + m.GetHistogram().GetSampleSum()
			}
		}
	}
	return sum
}
