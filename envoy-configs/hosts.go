package envoyconfigs

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
)

type address struct {
	Host string
	Port int
}

// ByName reports whether the host has to be looked up.
func (a address) ByName() bool {
	_, err := netip.ParseAddr(a.Host)
	return err != nil
}

func socketAddress(a address) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address: a.Host, PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(a.Port)},
	}}}
}

// hosts are the servers of one cluster.
type hosts struct {
	Cluster string
	Hosts   []address
}

// ByName reports whether any of them has to be looked up.
func (h hosts) ByName() bool { return slices.ContainsFunc(h.Hosts, address.ByName) }

func parse(hostPort string) (address, error) {
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		return address{}, fmt.Errorf("address %q: %w", hostPort, err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return address{}, fmt.Errorf("address %q: %w", hostPort, err)
	}
	return address{host, int(n)}, nil
}

// reachable makes a cluster of addresses to connect to: one that listens everywhere is reached on the loopback.
func reachable(cluster string, hostPorts []string) (hosts, error) {
	out := hosts{Cluster: cluster}
	for _, hp := range hostPorts {
		a, err := parse(hp)
		if err != nil {
			return hosts{}, err
		}
		if ip, err := netip.ParseAddr(a.Host); err == nil && ip.IsUnspecified() {
			a.Host = "127.0.0.1"
			if ip.Is6() {
				a.Host = "::1"
			}
		}
		out.Hosts = append(out.Hosts, a)
	}
	return out, nil
}
