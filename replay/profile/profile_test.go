package profile

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/picker"
)

// of measures an engine that is as a model says, with clocks that are wrong by a share.
func of(m *picker.Model, wrong float64) *Profile {
	p := &Profile{Engine: "10.0.0.1:8000", Model: "llama", KV: 500_000}
	random := rand.New(rand.NewPCG(1, 2))
	by := func() float64 { return 1 + wrong*(2*random.Float64()-1) }
	for _, n := range []int{256, 1024, 4096, 8192, 16384} {
		x := float64(n)
		p.Prefill = append(p.Prefill, Prefill{n, (m.PrefillStep + m.PrefillToken*x + m.PrefillContext*x*x/2) * by()})
	}
	for _, n := range []int{256, 1024, 16384} {
		p.Transfers = append(p.Transfers, Transfer{n, (m.TransferLag + m.TokenBytes*float64(n)/m.Bandwidth) * by()})
	}
	for _, b := range []int{1, 4, 16, 32} {
		for _, kv := range []float64{100, 2000} {
			all := float64(b) * kv
			p.Steps = append(p.Steps, Step{b, all, (m.DecodeStep + m.DecodeAnswer*float64(b) + m.DecodeToken*all) * by()})
		}
	}
	return p
}

// What is measured of an engine whose truth is known is that truth, also if each measurement is off by some per cent.
func TestKnownEngines(t *testing.T) {
	for name, truth := range map[string]picker.Model{
		"the usual": picker.DefaultModel(),
		"without attention": func() picker.Model {
			m := picker.DefaultModel()
			m.PrefillStep, m.PrefillToken, m.PrefillContext = 0, 1./5000, 0
			m.DecodeStep, m.DecodeAnswer, m.DecodeToken = .020, 0, 0
			return m
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			for _, wrong := range []float64{0, .03} {
				p := of(&truth, wrong)
				p.StepTokens = 2048
				file := filepath.Join(t.TempDir(), "profile.json")
				require.NoError(t, p.Write(file))
				read, err := Read(file)
				require.NoError(t, err)
				got := picker.DefaultModel()
				require.NoError(t, read.Apply(&got))
				require.InDelta(t, 2048, got.StepTokens, 0)
				for _, n := range []float64{500, 3000, 12000} {
					was := truth.PrefillStep + truth.PrefillToken*n + truth.PrefillContext*n*n/2
					require.InEpsilon(t, was, got.PrefillStep+got.PrefillToken*n+got.PrefillContext*n*n/2, .001+1.5*wrong)
				}
				for _, b := range []float64{2, 20} {
					was := truth.DecodeStep + truth.DecodeAnswer*b + truth.DecodeToken*b*1000
					require.InEpsilon(t, was, got.DecodeStep+got.DecodeAnswer*b+got.DecodeToken*b*1000, .001+1.5*wrong)
				}
				for _, n := range []float64{500, 12000} {
					was := truth.TransferLag + truth.TokenBytes*n/truth.Bandwidth
					require.InEpsilon(t, was, got.TransferLag+got.TokenBytes*n/got.Bandwidth, .001+1.5*wrong)
				}
				require.InDelta(t, 500_000, got.KVTokens, 0)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	m := picker.DefaultModel()
	require.Error(t, (&Profile{}).Apply(&m))
	p := of(&m, 0)
	p.Steps[0].Seconds = 0
	require.Error(t, p.Apply(&m))
	_, err := Read(filepath.Join(t.TempDir(), "none"))
	require.Error(t, err)
}
