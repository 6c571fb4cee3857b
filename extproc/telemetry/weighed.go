package telemetry

import (
	"slices"

	"tandem/picker"
)

// Weigh returns endpoints with the parts of their prices, at most maxWeighed. split: the request goes over two.
func Weigh(all []picker.Weighed, split bool) []Weighed {
	out := make([]Weighed, 0, min(len(all), maxWeighed))
	for _, c := range all[:cap(out)] {
		w := Weighed{Endpoint: c.Endpoint, Role: c.Role, Word: c.Word, Out: c.Out != "", Why: c.Out, Hit: c.Hit}
		if p := c.Prefill; p != nil && split {
			w.Prefill = parts([]Part{
				{Name: "queue", Value: p.Queue}, {Name: "work", Value: p.Work}, {Name: "load", Value: p.Load},
				{Name: "others", Value: p.Others}, {Name: "jobs", Value: p.Jobs}, {Name: "session", Value: p.Session},
			})
		}
		if d := c.Decode; d != nil && split {
			w.Decode = parts([]Part{
				{Name: "transfer", Value: c.Transfer}, {Name: "step", Value: d.Step}, {Name: "answer", Value: d.Answer},
				{Name: "overflow", Value: d.Overflow}, {Name: "session", Value: d.Session},
			})
		}
		if a := c.Alone; a != nil {
			alone := parts([]Part{
				{Name: "queue", Value: a.Queue}, {Name: "work", Value: a.Work}, {Name: "load", Value: a.Load},
				{Name: "others", Value: a.Others}, {Name: "answers", Value: a.Answers},
				{Name: "decode", Value: a.Decode}, {Name: "overflow", Value: a.Overflow},
				{Name: "session", Value: a.Session},
			})
			if w.Alone = alone; !split {
				w.Alone, w.Decode = nil, alone
			}
			switch {
			case c.TooLong:
				w.NotAlone = NotAloneTooLong
			case c.Busy:
				w.NotAlone = NotAloneBusy
			}
		}
		out = append(out, w)
	}
	return out
}

// parts removes the parts that are zero.
func parts(all []Part) []Part {
	return slices.DeleteFunc(all, func(p Part) bool { return p.Value == 0 })
}

// maxWeighed bounds what is reported of a large fleet.
const maxWeighed = 64
