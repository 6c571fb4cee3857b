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
)

// Envoy is what is known of one that is served.
type Envoy struct {
	Name    string    // its node id
	Build   string    // its release
	Version string    // of the configuration that it has; "": none yet
	Pending bool      // it has not answered to the newest yet
	Refused string    // the version that it refused last; "": none
	Why     string    // it did so, in its own words
	Since   time.Time // connected
}

// keptVersions bounds how many versions an Envoy can be led back through.
const keptVersions = 16

// envoy is one stream.
type envoy struct {
	node    *corev3.Node
	since   time.Time
	names   int               // of resources that it asked for
	served  []*version        // oldest first; the last is what it is to have
	refused map[string]bool   // versions
	waiting map[string]string // nonces that it has not answered to, with their versions
	why     string            // in its words, of the last that it refused
	last    string            // version that it refused last
}

func newEnvoy() *envoy {
	return &envoy{since: time.Now(), refused: map[string]bool{}, waiting: map[string]string{}}
}

// take notes that a version is what the Envoy is to have, and reports whether that is new.
func (e *envoy) take(v *version) bool {
	if e.refused[v.name] || len(e.served) > 0 && e.served[len(e.served)-1] == v {
		return false
	}
	e.served = append(slices.DeleteFunc(e.served, func(o *version) bool { return o.name == v.name }), v)
	if over := len(e.served) - keptVersions; over > 0 {
		e.served = slices.Delete(e.served, 0, over)
	}
	return true
}

// lastGood is the newest version that was served and not refused; nil: none.
func (e *envoy) lastGood() *version {
	for _, v := range slices.Backward(e.served) {
		if !e.refused[v.name] {
			return v
		}
	}
	return nil
}

// sent notes that resources are on their way.
func (e *envoy) sent(r *discoveryv3.DeltaDiscoveryResponse) {
	e.waiting[r.GetNonce()] = r.GetSystemVersionInfo()
}

// answer takes an Envoy's word on what it was sent. refused is the version that it refused.
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
	e.refused[name], e.last, e.why = true, name, bounded(r.GetErrorDetail().GetMessage(), 2048)
	return name, true
}

func (e *envoy) name() string { return bounded(e.node.GetId(), 128) }

// bounded keeps what a peer says of itself short.
func bounded(text string, n int) string { return strings.ToValidUTF8(text[:min(len(text), n)], "?") }

// build is Envoy's release.
func (e *envoy) build() string {
	v := e.node.GetUserAgentBuildVersion().GetVersion()
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", v.GetMajorNumber(), v.GetMinorNumber(), v.GetPatch())
}

func (e *envoy) report() Envoy {
	out := Envoy{Name: e.name(), Build: e.build(), Pending: len(e.waiting) > 0, Since: e.since}
	if v := e.lastGood(); v != nil {
		out.Version = v.name
	}
	if e.last != "" && e.refused[e.last] {
		out.Refused, out.Why = e.last, e.why
	}
	return out
}

// hash names a version after what is in it, so that two replicas with the same configuration serve the same version.
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
