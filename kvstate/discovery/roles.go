package discovery

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"tandem/kvstate"
)

// Labels defines how pods' labels are read.
type Labels struct {
	Role    string   // the label that holds the role
	Prefill []string // its values: prefill ...
	Decode  []string // ... decode ...
	Both    []string // ... and both
	Group   string   // the label whose value is the group; "": no groups
	Port    string   // the label that holds the engine's port; "": the configured ports
	Ranks   string   // the label that holds the number of data-parallel ranks behind each port; "": the engine chooses
	Zone    string   // the label whose value is the zone; "": zones are unknown
	Keep    []string // labels that the endpoint gets too, for requests to ask for

	// Default is the role of pods without the label, unless their engine reports one. 0: such pods are left out.
	Default kvstate.Role
}

// Conventions returns the presets of [Labels] by name, for the systems that start engines:
//
//   - llm-d: llm-d-router, pkg/epp/framework/plugins/scheduling/filter/bylabel; a pod without the label decodes (the
//     decode filter lets it pass, the prefill filter does not)
//   - aibrix: StormService and its gateway plugin (role-name, roleset-name, model.aibrix.ai/port); a pair shares a
//     role set
//   - production-stack: router flags --prefill-model-labels and --decode-model-labels over the label model
//   - kthena: ModelServing (modelserving.volcano.sh/role and /group-name); a pair shares a serving group
func Conventions(name string) (Labels, error) {
	l := Labels{Prefill: []string{"prefill"}, Decode: []string{"decode"}, Both: []string{"both"}}
	switch name {
	case "llm-d":
		l.Role, l.Default = "llm-d.ai/role", kvstate.RoleDecode
		l.Prefill = []string{"prefill", "encode-prefill"}
		l.Decode = []string{"decode", "encode-decode"}
		l.Both = []string{"both", "prefill-decode", "encode-prefill-decode"}
	case "aibrix":
		l.Role, l.Group, l.Port = "role-name", "roleset-name", "model.aibrix.ai/port"
	case "production-stack":
		l.Role = "model"
	case "kthena":
		l.Role, l.Group = "modelserving.volcano.sh/role", "modelserving.volcano.sh/group-name"
	default:
		return Labels{}, fmt.Errorf("%q is no convention of labels: one of llm-d, aibrix, production-stack, kthena",
			name)
	}
	return l, nil
}

// MaxRanks bounds the data-parallel ranks behind one port.
const MaxRanks = 64

// ranks returns the number of data-parallel ranks behind each port of a pod; 0 if its labels do not say.
func (l *Labels) ranks(labels map[string]string) int {
	if l.Ranks == "" {
		return 0
	}
	n, err := strconv.Atoi(labels[l.Ranks])
	if err != nil || n < 1 || n > MaxRanks {
		return 0
	}
	return n
}

// kept returns a pod's labels that its endpoints get, in the form of an endpoint's.
func (l *Labels) kept(labels map[string]string) string {
	var out []string
	for _, name := range l.Keep {
		if value := labels[name]; value != "" {
			out = append(out, name+"="+value)
		}
	}
	return strings.Join(out, ",")
}

// role returns a pod's role; 0 if it has none, or an unknown one. labelled is false if it has no role label.
func (l *Labels) role(labels map[string]string) (role kvstate.Role, labelled bool) {
	value, labelled := labels[l.Role]
	switch {
	case !labelled || l.Role == "":
		return 0, false
	case slices.Contains(l.Prefill, value):
		return kvstate.RolePrefill, true
	case slices.Contains(l.Decode, value):
		return kvstate.RoleDecode, true
	case slices.Contains(l.Both, value):
		return kvstate.RoleBoth, true
	case value == "encode": // as in llm-d; no other system uses the value for another engine
		return kvstate.RoleEncode, true
	}
	return 0, true
}
