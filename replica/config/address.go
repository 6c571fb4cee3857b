package config

import (
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

// seenAddress is an address that another setting already uses.
type seenAddress struct {
	host, port, path string
}

// checkListen checks an address to listen on, and that no other listener has it. Port 0 lets the system choose.
func checkListen(v *validator, path, address string) {
	host, port, ok := checkAddress(v, path, address)
	if !ok || port == "0" {
		return
	}
	for _, s := range v.listens {
		if s.port == port && (s.host == host || everywhere(s.host) || everywhere(host)) {
			v.m.add(path, "%s clashes with %s: give it another port", address, s.path)
			break
		}
	}
	v.listens = append(v.listens, seenAddress{host, port, path})
}

// addAddress checks an address to connect to, and that the list has it only once.
func addAddress(v *validator, seen []seenAddress, path, address string) []seenAddress {
	if address == "" {
		v.m.add(path, "is missing: ip:port, [ip]:port or name:port")
		return seen
	}
	host, port, ok := checkAddress(v, path, address)
	if !ok {
		return seen
	}
	if port == "0" {
		v.m.add(path, "%.100q has no port between 1 and 65535", address)
		return seen
	}
	for _, s := range seen {
		if s.host == host && s.port == port {
			v.m.add(path, "%s is already %s", address, s.path)
			return seen
		}
	}
	return append(seen, seenAddress{host, port, path})
}

// checkAddress splits host:port and normalises the host.
func checkAddress(v *validator, path, address string) (host, port string, ok bool) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		near := ""
		if u, bad := url.Parse(address); bad == nil && u.Scheme != "" && u.Port() != "" {
			near = "; did you mean " + u.Host + "?"
		}
		v.m.add(path, "%.100q is not an address: ip:port, [ip]:port or name:port%s", address, near)
		return "", "", false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		v.m.add(path, "%.100q has no port between 0 and 65535", address)
		return "", "", false
	}
	if host == "" {
		v.m.add(path, "%.100q has no host; 0.0.0.0 or [::] means every interface", address)
		return "", "", false
	}
	port = strconv.FormatUint(n, 10)
	if ip, err := netip.ParseAddr(host); err == nil && ip.Zone() == "" {
		return ip.String(), port, true
	}
	if !isName(host) {
		v.m.add(path, "%.100q is neither an IP address nor a name", host)
		return "", "", false
	}
	return strings.ToLower(host), port, true
}

func everywhere(host string) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsUnspecified()
}

// isName reports whether host can be a DNS name. A last label that is a number looks like a broken IP address.
func isName(host string) bool {
	labels := strings.Split(strings.TrimSuffix(host, "."), ".")
	for _, label := range labels {
		if label == "" || len(label) > 63 || strings.ContainsFunc(label, notInName) {
			return false
		}
	}
	last := labels[len(labels)-1]
	return len(host) <= 253 && strings.ContainsFunc(last, func(r rune) bool { return r < '0' || r > '9' })
}

func notInName(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_':
		return false
	}
	return true
}

// Reached returns the address at which this machine reaches a server that listens on an address of the configuration:
// for one that listens on every interface, loopback.
func Reached(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if ip := net.ParseIP(host); err == nil && (host == "" || ip != nil && ip.IsUnspecified()) {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return listen
}
