package membership

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
)

// Self returns where Envoys reach a replica that listens at two addresses: at host, or, if that is empty, at the
// address on which it listens, or, if it listens on all, at that from which it connects to Redis. Host names are looked
// up once, here.
func Self(ctx context.Context, extProc, replan, host, redisURL string) (Replica, error) {
	listen, port, err := net.SplitHostPort(extProc)
	if err != nil {
		return Replica{}, fmt.Errorf("extProc.listen: %w", err)
	}
	_, replanPort, err := net.SplitHostPort(replan)
	if err != nil {
		return Replica{}, fmt.Errorf("replan.listen: %w", err)
	}
	if host = cmp.Or(host, listen); host == "" || net.ParseIP(host).IsUnspecified() {
		if host, err = localAddress(ctx, redisURL); err != nil {
			return Replica{}, err
		}
	}
	if host, err = resolve(ctx, host); err != nil {
		return Replica{}, fmt.Errorf("the address of this replica (--advertise, extProc.listen): %w", err)
	}
	return Replica{ExtProc: net.JoinHostPort(host, port), Replan: net.JoinHostPort(host, replanPort)}, nil
}

// resolve returns the IP address of a host, which may be one already. If there are several, it takes the one on which a
// server listens if it is given this name: the first IPv4 address, if there is one. Envoys and other replicas get no
// names.
func resolve(ctx context.Context, host string) (string, error) {
	if _, err := netip.ParseAddr(host); err == nil {
		return host, nil
	}
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return "", err
	}
	first := max(0, slices.IndexFunc(found, func(a netip.Addr) bool { return a.Unmap().Is4() }))
	return found[first].Unmap().String(), nil
}

// localAddress returns the address from which this machine connects to a URL's host. It sends nothing.
func localAddress(ctx context.Context, to string) (string, error) {
	u, err := url.Parse(to)
	if err != nil {
		return "", fmt.Errorf("the URL of Redis: %w", err)
	}
	at := net.JoinHostPort(cmp.Or(u.Hostname(), "localhost"), cmp.Or(u.Port(), "6379"))
	c, err := new(net.Dialer).DialContext(ctx, "udp", at)
	if err != nil {
		return "", fmt.Errorf("the address towards Redis: %w", err)
	}
	defer c.Close()
	host, _, err := net.SplitHostPort(c.LocalAddr().String())
	return host, err
}
