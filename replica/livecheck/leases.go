package livecheck

import (
	"cmp"
	"slices"
	"time"

	"tandem/extproc/kvtransfer"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

const keptAnswers = 480 // vLLM's default of decoder_kv_blocks_ttl, in seconds

// checkLeases compares the settings by which KV expires, and by which D notices it (docs/security.md, Wrong text), with
// the engine's own. A vLLM without VLLM_SERVER_DEV_MODE does not report them.
func (a *engineAnswer) checkLeases(at string, p *configv1.Pool, e *configv1.Endpoint) {
	d := config.DialectOf(p)
	if d.Lease == 0 {
		return
	}
	if a.info.NoMetrics {
		a.warn(at+".address", "its /metrics cannot be read: nobody notices when it stands still, and only "+
			"nixl.declineExpired keeps answers from KV that was freed meanwhile")
	}
	if !pulls(&d) { // the settings of a MultiConnector's members are not read
		return
	}
	if e.GetRole() != "decode" {
		a.note("lease of KV", a.info.Told)
		if a.info.Connector != "" {
			a.checkLease(at+".address", d.Lease)
		}
	}
	if e.GetRole() != "prefill" {
		if p.GetNixl().GetDeclineExpired() {
			a.note("whether it declines expired KV", a.info.Told)
		}
		if a.info.Connector != "" {
			a.checkDeclines(at+".address", p.GetNixl())
		}
	}
}

// pulls reports whether engines of a dialect run vLLM's NIXL connector, and nothing else.
func pulls(d *kvtransfer.Dialect) bool { return slices.Contains(d.Reports.Connectors, "NixlConnector") }

func (a *engineAnswer) checkLease(at string, configured time.Duration) {
	lease := a.info.Extra.LeaseTime()
	switch cmp.Compare(lease, configured) {
	case -1:
		a.report(at, "the engine frees KV after %s (kv_lease_duration), and the pool's nixl.lease is %s: "+
			"decode would be sent for KV that is another prompt's by then; set nixl.lease to %s",
			lease, configured, lease)
	case 1:
		a.warn(at, "the engine keeps KV for %s (kv_lease_duration), and the pool's nixl.lease is %s: "+
			"set nixl.lease to %s, or answers are refused too early", lease, configured, lease)
	}
}

func (a *engineAnswer) checkDeclines(at string, n *configv1.NIXL) {
	kept := float64(keptAnswers)
	if set := a.info.Extra.TTL; set != nil {
		kept = *set
	}
	switch looks := a.info.Extra.Bidirectional; {
	case n.GetDeclineExpired() && !looks:
		a.report(at, "the pool has nixl.declineExpired, and the engine does not look at when leases end: "+
			"start it with %s in kv_connector_extra_config", `"bidirectional_kv_xfer":true,"decoder_kv_blocks_ttl":1`)
	case looks && !n.GetDeclineExpired():
		a.report(at, "the engine runs with bidirectional_kv_xfer, and clients would get the "+
			"kv_transfer_params of its answers: set nixl.declineExpired")
	case n.GetDeclineExpired() && kept > 10:
		a.warn(at, "the engine keeps the KV of each answer for %g s, and nobody fetches it: "+
			"start it with %s in kv_connector_extra_config", kept, `"decoder_kv_blocks_ttl":1`)
	}
}

func (a *engineAnswer) warn(path, format string, args ...any) {
	a.report(path, format, args...)
	a.findings[len(a.findings)-1].note = true
}

// advice returns the recommended settings that a pool lacks, in words; "" if it has them.
func advice(p *configv1.Pool) string {
	switch d := config.DialectOf(p); {
	case !pulls(&d) || p.GetHandoff() != "envoy":
	case !p.GetNixl().GetDeclineExpired():
		return p.GetName() + ": decode does not look at when the lease of KV ends, for nixl.declineExpired " +
			"is not set: see docs/security.md, Wrong text"
	case d.Lease < recommendedLease:
		return p.GetName() + ": a request that waits at decode for longer than nixl.lease (" + d.Lease.String() +
			") less 6 s computes its prompt again: 120s is recommended, with kv_lease_duration 120 of prefill"
	}
	return ""
}

// recommendedLease is above the time of a prefill and of a queue at decode (docs/adr/0051).
const recommendedLease = 2 * time.Minute
