package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	configv1 "tandem/protos/config/v1"
)

// maxBufferedWait is the maximum wait of a request whose body Envoy has buffered: its message_timeout is 30 s.
const maxBufferedWait = 20 * time.Second

// Waits reports whether the pool's requests may have to wait for their endpoints.
func Waits(p *configv1.Pool) bool {
	return p.GetBinding() == "late" || p.GetObjectives().GetOnMiss() == "queue"
}

func setObjectiveDefaults(p *configv1.Pool) {
	p.Binding = cmp.Or(p.Binding, binding(p))
	if Waits(p) {
		sub(&p.Queue)
	}
}

// binding returns the default of a pool's binding. Requests wait for prefill endpoints only.
func binding(p *configv1.Pool) string {
	if neverSplits(p) {
		return "immediate"
	}
	return "late"
}

func neverSplits(p *configv1.Pool) bool { return p.KvTransfer == "none" || p.Split == "never" }

// setWaitDefault sets the maximum wait of a pool's requests: in the replay a minute is as good as no limit, and 20 s
// turn an overload into first come, first served.
func setWaitDefault(p *configv1.Pool, bodyMode string) {
	switch {
	case p.Queue == nil:
	case bodyMode == "duplex":
		p.Queue.MaxWait = cmp.Or(p.Queue.MaxWait, "60s")
	default:
		p.Queue.MaxWait = cmp.Or(p.Queue.MaxWait, "20s")
	}
}

// checkObjectives checks the settings of queueing and of requests' objectives.
func checkObjectives(v *validator, path string, p *configv1.Pool) {
	if p.Binding == "late" && neverSplits(p) {
		v.warnGiven([]string{path + ".kvTransfer", path + ".split", path + ".endpoints"}, path+".binding",
			"has no effect: requests wait for prefill endpoints, and nothing is split here")
	}
	if q := p.Queue; q != nil {
		if !Waits(p) {
			v.warnGiven([]string{path + ".binding", path + ".objectives"}, path+".queue",
				"has no effect: requests wait with binding late, or with objectives.onMiss queue")
		}
		if v.bodyMode != "duplex" && Duration(q.MaxWait) > maxBufferedWait {
			v.m.add(path+".queue.maxWait",
				"is above %s, and envoy.bodyMode %s: Envoy waits no longer for what becomes of a buffered body",
				maxBufferedWait, v.bodyMode)
		}
	}
	o := p.Objectives
	if o == nil {
		return
	}
	if o.Default != nil {
		if o.Default.Name != "" {
			v.m.add(path+".objectives.default.name", "%.100q: requests that get the default name none", o.Default.Name)
		}
	}
	var names []string
	for i, n := range o.Named {
		at := fmt.Sprintf("%s.objectives.named[%d]", path, i)
		checkNeeded(v, at+".name", n.Name, "what requests call it")
		if n.Name != "" && slices.Contains(names, n.Name) {
			v.m.add(at+".name", "%.100q is there twice", n.Name)
		}
		names = append(names, n.Name)
	}
}

// checkCommaFree checks names that are stored with commas between them.
func checkCommaFree(v *validator, path string, names []string) {
	for i, name := range names {
		if name == "" || strings.ContainsAny(name, ", ") {
			v.m.add(fmt.Sprintf("%s[%d]", path, i), "%.100q is empty, or has a comma or a space in it", name)
		}
	}
}

func checkLabels(v *validator, path string, labels []string) {
	checkCommaFree(v, path, labels)
	for i, l := range labels {
		if name, value, ok := strings.Cut(l, "="); l != "" && (!ok || name == "" || value == "") {
			v.m.add(fmt.Sprintf("%s[%d]", path, i), "%.100q is not name=value", l)
		}
	}
}
