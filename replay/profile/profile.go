// Package profile is how fast an engine was measured to be, and makes of it the model of engines that the replay
// plays.
//
// Arrows: it imports picker for the model. `tandem profile` measures, package replay reads the file.
package profile

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"

	"tandem/picker"
)

// Profile is what was measured of an engine.
type Profile struct {
	Version  int       `json:"tandem_profile"` // 1
	Engine   string    `json:"engine"`         // its address
	Model    string    `json:"model"`
	Measured string    `json:"measured"` // when (RFC 3339)
	Prefill  []Prefill `json:"prefill"`
	Steps    []Step    `json:"steps"`
	// of KV to another engine; none: that was not measured
	Transfers []Transfer `json:"transfers,omitempty"`

	// StepTokens is how many tokens of a prompt it computes in one step, beside answers; 0: that was not to be seen.
	StepTokens float64 `json:"step_tokens,omitempty"`

	KV   float64 `json:"kv,omitempty"`   // tokens of GPU memory; 0: it does not say
	Host float64 `json:"host,omitempty"` // of host memory
}

// Prefill is one prompt.
type Prefill struct {
	Tokens  int     `json:"tokens"`
	Seconds float64 `json:"s"`
}

// Step is the mean time of a decode step of so many answers.
type Step struct {
	Answers int     `json:"answers"`
	KV      float64 `json:"kv"` // tokens of all of them
	Seconds float64 `json:"s"`
}

// Transfer is the KV of a prompt on its way to another engine.
type Transfer struct {
	Tokens  int     `json:"tokens"`
	Seconds float64 `json:"s"`
}

// version of the format.
const version = 1

// Read reads a profile.
func Read(file string) (*Profile, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading a profile: %w", err)
	}
	p := &Profile{}
	if err := json.Unmarshal(text, p); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if p.Version != version {
		return nil, fmt.Errorf("%s: not a profile of version %d, which tandem profile writes", file, version)
	}
	return p, p.check()
}

// Write writes the profile.
func (p *Profile) Write(file string) error {
	p.Version = version
	text, err := json.MarshalIndent(p, "", " ")
	if err != nil {
		return fmt.Errorf("writing a profile: %w", err)
	}
	if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil { //nolint:gosec // it is no secret
		return fmt.Errorf("writing a profile: %w", err)
	}
	return nil
}

func (p *Profile) check() error {
	if len(p.Prefill) < 2 || len(p.Steps) < 2 {
		return errors.New("a profile needs two prompts and two batches at least")
	}
	for _, x := range p.Prefill {
		if x.Tokens < 1 || !(x.Seconds > 0) || math.IsInf(x.Seconds, 1) {
			return fmt.Errorf("a prompt that cannot be: %+v", x)
		}
	}
	for _, x := range p.Steps {
		if x.Answers < 1 || !(x.KV >= 0) || !(x.Seconds > 0) || math.IsInf(x.Seconds+x.KV, 1) {
			return fmt.Errorf("a step that cannot be: %+v", x)
		}
	}
	for _, x := range p.Transfers {
		if x.Tokens < 1 || !(x.Seconds > 0) || math.IsInf(x.Seconds, 1) {
			return fmt.Errorf("a transfer that cannot be: %+v", x)
		}
	}
	return nil
}

// Apply sets what was measured in a model.
func (p *Profile) Apply(m *picker.Model) error {
	if err := p.check(); err != nil {
		return err
	}
	// t = each n + context n^2/2; a step's own time is known of none, so the shortest prompt's is divided among its
	// tokens
	var rows [][]float64
	var t []float64
	for _, x := range p.Prefill {
		n := float64(x.Tokens)
		rows, t = append(rows, []float64{1, n, n * n / 2}), append(t, x.Seconds)
	}
	of := leastSquares(rows, t)
	m.PrefillStep, m.PrefillToken, m.PrefillContext = of[0], max(of[1], 1e-9), of[2]
	rows, t = nil, nil
	for _, x := range p.Steps {
		rows, t = append(rows, []float64{1, float64(x.Answers), x.KV}), append(t, x.Seconds)
	}
	of = leastSquares(rows, t)
	m.DecodeStep, m.DecodeAnswer, m.DecodeToken = of[0], of[1], of[2]
	if len(p.Transfers) > 0 { // t = lag + bytes n / bandwidth
		rows, t = nil, nil
		for _, x := range p.Transfers {
			rows, t = append(rows, []float64{1, float64(x.Tokens)}), append(t, x.Seconds)
		}
		of = leastSquares(rows, t)
		m.TransferLag, m.Bandwidth = of[0], m.TokenBytes/max(of[1], 1e-12)
	}
	if p.KV > 0 {
		m.KVTokens = p.KV
	}
	if p.StepTokens >= 1 {
		m.StepTokens = p.StepTokens
	}
	return nil
}

// leastSquares returns the weights, none below 0, with which the sums of the rows are nearest to the values,
// relative to them. It descends by coordinates, which finds the one least point of such a sum.
func leastSquares(rows [][]float64, values []float64) []float64 {
	n := len(rows[0])
	out, scale := make([]float64, n), make([]float64, n)
	for i, row := range rows {
		for j, x := range row {
			scale[j] = max(scale[j], x/values[i])
		}
	}
	for range 20_000 {
		moved := 0.0
		for j := range n {
			up, down := 0.0, 0.0
			if scale[j] == 0 {
				continue
			}
			for i, row := range rows {
				rest := 1.0
				for k, x := range row {
					if k != j {
						rest -= out[k] * x / values[i]
					}
				}
				x := row[j] / values[i]
				up, down = up+rest*x, down+x*x
			}
			next := max(up/down, 0)
			moved = max(moved, math.Abs(next-out[j])*scale[j])
			out[j] = next
		}
		if moved < 1e-12 {
			break
		}
	}
	return out
}
