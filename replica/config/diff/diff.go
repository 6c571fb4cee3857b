// Package diff says what differs between two configurations.
package diff

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// Change is one setting that differs between two configurations.
type Change struct {
	Path          string // pools[chat].endpoints[10.0.0.1:8101].weight: pools by name, endpoints by address
	Before, After string // "": absent. Settings that may hold a secret are not shown
	Live          bool   // may change while the server runs
	Envoy         bool   // only Envoy uses it: Envoys with xDS get it at once
}

// Difference lists the changes from one configuration to another, in the order of config.proto. Both must come from
// [Load].
func Difference(before, after *configv1.Config) (out []Change) {
	d := difference{moves: moves(before, after)}
	d.messages("", before.ProtoReflect(), after.ProtoReflect())
	return d.changes
}

type difference struct {
	moves   bool
	changes []Change
}

func (d *difference) add(path, before, after string) {
	if path == "state.redis.url" { // holds a password
		before, after = "", "(changed)"
	}
	envoy := ofEnvoy(path, d.moves)
	d.changes = append(d.changes, Change{path, before, after, envoy || strings.HasPrefix(path, "pools["), envoy})
}

// moves reports whether the server's ports change. The server takes new ports at its next start; until then Envoy must
// use the old ones.
func moves(before, after *configv1.Config) bool {
	return before.GetExtProc().GetListen() != after.GetExtProc().GetListen() ||
		before.GetReplan().GetListen() != after.GetReplan().GetListen() ||
		!proto.Equal(before.GetExtProc().GetTls(), after.GetExtProc().GetTls())
}

// ofEnvoy reports whether only Envoy uses a setting. The server reads envoy's other settings too, at its start; admin
// and stats are in Envoy's bootstrap.
func ofEnvoy(path string, moves bool) bool {
	name, found := strings.CutPrefix(path, "envoy.")
	name, _, _ = strings.Cut(name, ".")
	switch name {
	case "admin", "stats", "maxBodyBytes", "pathPrefixes", "run":
		return false
	case "extProcs", "replans", "extProcTls":
		return found && !moves
	}
	return found
}

// Fingerprint returns a short name of a configuration's pools. Replicas of one fleet should have the
// same.
func Fingerprint(c *configv1.Config) string {
	text, err := proto.MarshalOptions{Deterministic: true}.Marshal(&configv1.Config{Pools: c.GetPools()})
	if err != nil {
		return "" // not valid: no replica runs with it
	}
	return strconv.FormatUint(xxhash.Sum64(text), 16)
}

// TakeEnvoy copies into c the settings of another configuration that only Envoy uses.
func TakeEnvoy(c, of *configv1.Config) {
	moves, own, next := moves(c, of), c.GetEnvoy().ProtoReflect(), proto.CloneOf(of.GetEnvoy())
	to, fields := next.ProtoReflect(), own.Descriptor().Fields()
	for i := range fields.Len() {
		switch f := fields.Get(i); {
		case ofEnvoy("envoy."+f.JSONName(), moves):
		case own.Has(f):
			to.Set(f, own.Get(f))
		default:
			to.Clear(f)
		}
	}
	c.Envoy = next
}

func (d *difference) messages(path string, before, after protoreflect.Message) {
	fields := before.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		at, b, a := config.Join(path, f.JSONName()), before.Get(f), after.Get(f)
		switch {
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			d.lists(at, b.List(), a.List())
		case f.IsList():
			d.values(at, listed(b.List()), listed(a.List()))
		case f.Kind() == protoreflect.MessageKind:
			d.presence(at, before.Has(f), after.Has(f))
			d.messages(at, b.Message(), a.Message())
		default:
			d.values(at, scalar(before, f), scalar(after, f))
		}
	}
}

// scalar returns a setting's value; "" if it is absent, since the 0 in the message may not be the default.
func scalar(m protoreflect.Message, f protoreflect.FieldDescriptor) string {
	if !m.Has(f) && f.Kind() != protoreflect.BoolKind {
		return ""
	}
	return m.Get(f).String()
}

// presence records a message that only one of both has: even an empty one may have a meaning.
func (d *difference) presence(path string, before, after bool) {
	if before != after {
		d.add(path, set(before), set(after))
	}
}

func set(present bool) string {
	if present {
		return "set"
	}
	return ""
}

func (d *difference) values(path, before, after string) {
	if before != after {
		d.add(path, before, after)
	}
}

func listed(l protoreflect.List) string {
	all := make([]string, l.Len())
	for i := range all {
		all[i] = l.Get(i).String()
	}
	return strings.Join(all, ", ")
}

// lists compares lists of named messages: kept, removed and new ones, and their order.
func (d *difference) lists(path string, before, after protoreflect.List) {
	old, oldNames := byName(before)
	now, names := byName(after)
	for _, name := range oldNames {
		at := fmt.Sprintf("%s[%s]", path, name)
		if a, stays := now[name]; stays {
			d.messages(at, old[name], a)
		} else {
			d.add(at, summary(old[name]), "")
		}
	}
	for _, name := range names {
		if _, known := old[name]; !known {
			d.add(fmt.Sprintf("%s[%s]", path, name), "", summary(now[name]))
		}
	}
	stay := func(in map[string]protoreflect.Message) func(string) bool {
		return func(name string) bool { return in[name] == nil }
	}
	if a, b := slices.DeleteFunc(oldNames, stay(now)), slices.DeleteFunc(names, stay(old)); !slices.Equal(a, b) {
		d.add(path+"[]", strings.Join(a, ", "), strings.Join(b, ", "))
	}
}

// byName returns the messages of a list by their key: the name of a pool, the address of an endpoint.
func byName(l protoreflect.List) (found map[string]protoreflect.Message, names []string) {
	found = map[string]protoreflect.Message{}
	for i := range l.Len() {
		m := l.Get(i).Message()
		f := m.Descriptor().Fields().ByName("name")
		if f == nil {
			f = m.Descriptor().Fields().ByName("address")
		}
		name := fmt.Sprint(i)
		if f != nil {
			name = m.Get(f).String()
		}
		found[name] = m
		names = append(names, name)
	}
	return found, names
}

// summary returns a message on one line.
func summary(m protoreflect.Message) string {
	var out []string
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		switch {
		case !m.Has(f) || f.Kind() == protoreflect.MessageKind && !f.IsList():
		case f.Kind() == protoreflect.MessageKind:
			out = append(out, fmt.Sprintf("%s: %d", f.JSONName(), m.Get(f).List().Len()))
		case f.IsList():
			out = append(out, f.JSONName()+": "+listed(m.Get(f).List()))
		default:
			out = append(out, f.JSONName()+": "+m.Get(f).String())
		}
	}
	return strings.Join(out, ", ")
}

// Outermost drops the paths within another one: what is new is named with all that it has.
func Outermost(paths []string) []string {
	return slices.DeleteFunc(slices.Clone(paths), func(path string) bool {
		return slices.ContainsFunc(paths, func(outer string) bool { return config.Within(path, outer) })
	})
}
