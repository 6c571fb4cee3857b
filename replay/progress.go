package replay

import (
	"fmt"
	"io"
	"strings"
)

// Bar shows the progress of a run on one line that it rewrites.
type Bar struct {
	w     io.Writer
	name  string
	shown int
}

// NewBar returns a bar for a run of that name.
func NewBar(w io.Writer, name string) *Bar { return &Bar{w: w, name: name, shown: -1} }

const barWidth = 30

// Show has the signature of Config.Progress.
func (b *Bar) Show(done, of int) {
	percent := 100 * done / max(of, 1)
	if percent == b.shown {
		return
	}
	b.shown = percent
	full := barWidth * percent / 100
	fmt.Fprintf(b.w, "\r%-15s [%s%s] %3d %%", b.name, strings.Repeat("#", full), strings.Repeat(".", barWidth-full),
		percent)
	if done == of {
		fmt.Fprintln(b.w)
	}
}
