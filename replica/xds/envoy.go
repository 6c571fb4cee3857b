package xds

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"

	"tandem/extproc/envoywire"
)

// Envoy is the state of a connected Envoy.
type Envoy struct {
	Name    string    // its node id
	Build   string    // its release
	Risk    string    // what that release risks, in words; "": nothing that is known
	Version string    // of its configuration; "": none yet
	Pending bool      // it has not acknowledged the newest version yet
	Refused string    // the newest version, if it refused that; "": it did not
	Why     string    // its error message for that
	Since   time.Time // connected
	Left    time.Time // zero: it is connected
}

// keptVersions bounds the versions to which an Envoy can be reverted.
const keptVersions = 16

// envoy is one stream.
type envoy struct {
	node    *corev3.Node
	since   time.Time
	names   int               // number of requested resources
	served  []*version        // oldest first; the last is the current one
	refused map[string]string // versions, with its error messages
	waiting map[string]string // unacknowledged nonces, with their versions
}

func newEnvoy() *envoy {
	return &envoy{since: time.Now(), refused: map[string]string{}, waiting: map[string]string{}}
}

// take sets the Envoy's current version, and reports whether it is new.
func (e *envoy) take(v *version) bool {
	if e.refuses(v) || len(e.served) > 0 && e.served[len(e.served)-1] == v {
		return false
	}
	e.served = append(slices.DeleteFunc(e.served, func(o *version) bool { return o.name == v.name }), v)
	if over := len(e.served) - keptVersions; over > 0 {
		e.served = slices.Delete(e.served, 0, over)
	}
	return true
}

// refuses reports whether the Envoy has refused a version.
func (e *envoy) refuses(v *version) bool {
	_, refused := e.refused[v.name]
	return refused
}

// lastGood returns the newest version that was served and not refused; nil: none.
func (e *envoy) lastGood() *version {
	for _, v := range slices.Backward(e.served) {
		if !e.refuses(v) {
			return v
		}
	}
	return nil
}

// sent records that resources are about to be sent.
func (e *envoy) sent(r *discoveryv3.DeltaDiscoveryResponse) {
	e.waiting[r.GetNonce()] = r.GetSystemVersionInfo()
}

// answer records an Envoy's acknowledgement or refusal. refused is the version that it refused.
func (e *envoy) answer(r *discoveryv3.DeltaDiscoveryRequest) (refused string, answered bool) {
	name, answered := e.waiting[r.GetResponseNonce()]
	if !answered {
		return "", false
	}
	delete(e.waiting, r.GetResponseNonce())
	if r.GetErrorDetail() == nil {
		return "", true
	}
	if len(e.refused) >= 2*keptVersions {
		clear(e.refused)
	}
	why := strings.Join(strings.Fields(r.GetErrorDetail().GetMessage()), " ") // Envoy ends some with a new line
	e.refused[name] = bounded(why, 2048)
	return name, true
}

func (e *envoy) name() string { return bounded(e.node.GetId(), 128) }

// bounded shortens a text that comes from a peer.
func bounded(text string, n int) string { return strings.ToValidUTF8(text[:min(len(text), n)], "?") }

// build returns Envoy's release.
func (e *envoy) build() string {
	v := e.node.GetUserAgentBuildVersion().GetVersion()
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", v.GetMajorNumber(), v.GetMinorNumber(), v.GetPatch())
}

// risk returns what its release risks.
func (e *envoy) risk() string {
	v := e.node.GetUserAgentBuildVersion().GetVersion()
	if v == nil {
		return ""
	}
	return envoywire.Risk(v.GetMajorNumber(), v.GetMinorNumber(), v.GetPatch())
}

// report returns the Envoy's state; newest is the version that it should have, nil if there is none.
func (e *envoy) report(newest *version) Envoy {
	out := Envoy{Name: e.name(), Build: e.build(), Risk: e.risk(), Pending: len(e.waiting) > 0, Since: e.since}
	if v := e.lastGood(); v != nil {
		out.Version = v.name
	}
	if newest != nil && e.refuses(newest) {
		out.Refused, out.Why = newest.name, e.refused[newest.name]
	}
	return out
}

// hash returns the version name of resources, so that two replicas with the same configuration serve the same version.
func hash(kinds map[string][]types.Resource) (string, error) {
	h := sha256.New()
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		sorted := slices.SortedFunc(slices.Values(kinds[kind]), func(a, b types.Resource) int {
			return strings.Compare(cache.GetResourceName(a), cache.GetResourceName(b))
		})
		for _, resource := range sorted {
			bytes, err := cache.MarshalResource(resource)
			if err != nil {
				return "", fmt.Errorf("making a version of Envoy's configuration: %w", err)
			}
			fmt.Fprintf(h, "%s %d\n", kind, len(bytes))
			h.Write(bytes)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:6]), nil
}
