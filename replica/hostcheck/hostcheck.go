// Package hostcheck refuses requests to the admin port under names that are not its own.
package hostcheck

import (
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"

	configv1 "tandem/protos/config/v1"
)

// Check refuses requests to the admin port under a name that is not its own. A page of a stranger can have a name
// of his resolve to this machine's address (DNS rebinding); the browser then lets the page read what the port answers.
// Such an attack needs a name that the stranger can register, so addresses need no check.
type Check struct {
	names map[string]bool // lower case, without a dot at the end
	below []string        // ".example.com": all names that end so
}

// New allows what admin.hosts lists, and the names by which the configuration, --advertise and the system know
// this machine.
func New(cfg *configv1.Config, advertise string) *Check {
	c := &Check{names: map[string]bool{}}
	addresses := append([]string{cfg.GetAdmin().GetListen(), advertise}, cfg.GetEnvoy().GetExtProcs()...)
	for _, address := range append(addresses, cfg.GetEnvoy().GetReplans()...) {
		if host := hostOf(address); host != "" {
			c.names[host] = true
		}
	}
	if name, err := os.Hostname(); err == nil {
		c.names[hostOf(name)] = true
	}
	for _, name := range cfg.GetAdmin().GetHosts() {
		if below, found := strings.CutPrefix(name, "*"); found {
			c.below = append(c.below, hostOf(below))
		} else {
			c.names[hostOf(name)] = true
		}
	}
	return c
}

// hostOf returns the host of host:port, host, [ip] or [ip]:port, lower case.
func hostOf(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// allows reports whether a Host header names this port. Nobody can register a name without a dot, nor one below
// localhost, svc or cluster.local. Browsers always send a Host; HTTP/1.0 clients may send none.
func (c *Check) allows(header string) bool {
	host := hostOf(header)
	if _, err := netip.ParseAddr(host); err == nil || c.names[host] || !strings.Contains(host, ".") {
		return true
	}
	for _, end := range append([]string{".localhost", ".svc", ".svc.cluster.local"}, c.below...) {
		if strings.HasSuffix(host, end) {
			return true
		}
	}
	return false
}

// Around answers 421 instead of next where the Host is another's.
func (c *Check) Around(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !c.allows(r.Host) {
			http.Error(w, "This port does not answer under the name in the Host header. Use an IP address or "+
				"localhost, or list the name in admin.hosts (docs/security.md#ports).", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
