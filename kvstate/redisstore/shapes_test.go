package redisstore

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/kvstate"
)

// agree has two replicas do everything that needs Redis.
func agree(t *testing.T, o Options) (a, b *replica) {
	t.Helper()
	a, b = join(t, o, 2), join(t, o, 2)
	hashes := prompt(7, 40)
	a.state.Routed(a.pool, a.e(1), hashes)
	a.state.Bookings.Reserve(a.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 5})
	eventually(t, "prefix and booking are known", func() bool { return b.hit(1, hashes) == 40 && b.booked(0) == 1 })
	ticket := uint64(0)
	eventually(t, "tickets are spent for all", func() bool {
		ticket++
		return a.state.HandOvers.Consume(ticketOf(ticket)) && !b.state.HandOvers.Consume(ticketOf(ticket))
	})
	eventually(t, "hand-overs are found", func() bool {
		ref, err := a.state.HandOvers.PutHandOver([]byte("params"))
		require.NoError(t, err)
		_, ok := b.state.HandOvers.TakeHandOver(ref)
		return ok
	})
	eventually(t, "keys are everybody's", func() bool {
		var sealA, sealB [32]byte
		_, err := a.store.Secrets(context.Background(), func(seal [32]byte, _ ...[32]byte) error { sealA = seal; return nil })
		require.NoError(t, err)
		_, err = b.store.Secrets(context.Background(), func(seal [32]byte, _ ...[32]byte) error { sealB = seal; return nil })
		require.NoError(t, err)
		return sealA == sealB
	})
	c := join(t, o, 2)
	require.Equal(t, 40, c.hit(1, hashes), "a late comer is warm")
	return a, b
}

// startCluster starts three masters, each with a third of the slots, and as many replicas of theirs as asked for.
func startCluster(t *testing.T, replicas int) []*server {
	t.Helper()
	var nodes []*server
	var buses []string
	for _, addr := range loopback.Addresses(t, 3+replicas) {
		_, bus, err := net.SplitHostPort(addr)
		require.NoError(t, err)
		buses = append(buses, bus)
		nodes = append(nodes, startRedis(t, "--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"))
	}
	for i, n := range nodes[:3] {
		n.do("CLUSTER", "ADDSLOTSRANGE", i*16384/3, (i+1)*16384/3-1)
		n.do("CLUSTER", "SET-CONFIG-EPOCH", i+1)
	}
	for i, n := range nodes[1:] {
		_, port, err := net.SplitHostPort(n.Addr)
		require.NoError(t, err)
		nodes[0].do("CLUSTER", "MEET", "127.0.0.1", port, buses[i+1])
	}
	info := func(n *server) string {
		c := n.client()
		defer c.Close()
		return c.ClusterInfo(context.Background()).Val()
	}
	eventually(t, "the cluster is whole", func() bool {
		for _, n := range nodes {
			if text := info(n); !strings.Contains(text, "cluster_state:ok") || !strings.Contains(text, fmt.Sprintf("cluster_known_nodes:%d", len(nodes))) {
				return false
			}
		}
		return true
	})
	for i, n := range nodes[3:] {
		master := nodes[i%3].client()
		id := master.ClusterMyID(context.Background()).Val()
		_ = master.Close()
		n.do("CLUSTER", "REPLICATE", id)
	}
	return nodes
}

func TestCluster(t *testing.T) {
	nodes := startCluster(t, 0)
	o := Options{URL: "redis://" + nodes[0].Addr, Nodes: []string{nodes[1].Addr, nodes[2].Addr}}
	agree(t, o)
	// One node suffices to find the others.
	agree(t, Options{URL: "redis://" + nodes[1].Addr, Cluster: true, KeyPrefix: "another"})
}

// A master of a Cluster dies and its replica takes over: what was published meanwhile arrives after.
func TestClusterFailover(t *testing.T) {
	nodes := startCluster(t, 3)
	o := Options{URL: "redis://" + nodes[0].Addr, Cluster: true, Lease: time.Second}
	for _, n := range nodes[3:] {
		c := n.client()
		eventually(t, "replicas follow their masters", func() bool {
			return strings.Contains(c.Info(context.Background(), "replication").Val(), "master_link_status:up")
		})
		_ = c.Close()
	}
	a, b := join(t, o, 2), join(t, o, 2)
	c := nodes[0].client()
	slot := c.ClusterKeySlot(context.Background(), a.p.keys.stream()).Val()
	_ = c.Close()
	owner := nodes[min(int(slot)*3/16384, 2)]
	if owner == nodes[0] {
		t.Log("the pool lies on the node that is asked for the others")
	}
	owner.Kill()
	hashes := prompt(1, 20)
	a.state.Routed(a.pool, a.e(0), hashes)
	require.True(t, a.state.HandOvers.Consume([16]byte{1}))
	took := eventually(t, "it is told to the new master", func() bool { return b.hit(0, hashes) == 20 })
	t.Logf("told %v after the old one died", took)
	require.True(t, b.state.HandOvers.Consume([16]byte{2}))
}

// Sentinels say which server is the master, and find another when it dies.
func TestSentinel(t *testing.T) {
	master := startRedis(t)
	host, port, err := net.SplitHostPort(master.Addr)
	require.NoError(t, err)
	follower := startRedis(t, "--replicaof", host+" "+port)
	var sentinels []*server
	for range 3 {
		file := filepath.Join(t.TempDir(), "sentinel.conf")
		require.NoError(t, os.WriteFile(file, []byte(fmt.Sprintf(
			"sentinel monitor shared %s %s 2\nsentinel down-after-milliseconds shared 500\nsentinel failover-timeout shared 2000\n", host, port)), 0o600))
		sentinels = append(sentinels, startRedis(t, file, "--sentinel"))
	}
	for _, s := range sentinels {
		c := s.client()
		eventually(t, "sentinels know each other and the follower", func() bool {
			text := c.Info(context.Background(), "sentinel").Val()
			return strings.Contains(text, "slaves=1,sentinels=3")
		})
		_ = c.Close()
	}
	o := Options{URL: "redis://" + sentinels[0].Addr, Nodes: []string{sentinels[1].Addr, sentinels[2].Addr}, SentinelMaster: "shared", Lease: time.Second}
	a, b := agree(t, o)
	master.Kill()
	hashes := prompt(1, 20)
	a.state.Routed(a.pool, a.e(0), hashes)
	require.True(t, a.state.HandOvers.Consume([16]byte{1, 1}))
	took := eventually(t, "it is told to the new master", func() bool { return b.hit(0, hashes) == 20 })
	t.Logf("told %v after the old one died", took)
	c := follower.client()
	defer c.Close()
	require.Contains(t, c.Info(context.Background(), "replication").Val(), "role:master")
}

// TLS with a private authority, a user of its own, and a password from a file that may do what we do and no more: the ACL of
// docs/security.md.
func TestTLSAndACL(t *testing.T) {
	dir := t.TempDir()
	pool := certificate(t, dir)
	encrypted := loopback.Addresses(t, 1)[0]
	_, port, err := net.SplitHostPort(encrypted)
	require.NoError(t, err)
	r := startRedis(t, "--tls-port", port, "--tls-cert-file", dir+"/cert.pem", "--tls-key-file", dir+"/key.pem", "--tls-auth-clients", "no")
	r.do(append([]any{"ACL", "SETUSER", "tandem", "on", ">s3cret", "resetkeys", "~tandem:*"}, strings2any(accessList())...)...)
	password := filepath.Join(dir, "password")
	require.NoError(t, os.WriteFile(password, []byte("s3cret\n"), 0o600))
	o := Options{
		URL: fmt.Sprintf("rediss://tandem@%s/0", encrypted), PasswordFile: password,
		TLS: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool},
	}
	require.NoError(t, CheckRights(t.Context(), o))
	agree(t, o)

	r.do("ACL", "SETUSER", "tandem", "-hvals", "-mget")
	missing := CheckRights(t.Context(), o)
	require.ErrorContains(t, missing, "HVALS is refused by Redis: NOPERM")
	require.ErrorContains(t, missing, "MGET is refused by Redis: NOPERM")
	require.Len(t, strings.Split(missing.Error(), "\n"), 2)
	refused := apart(t, o, 1)
	eventually(t, "the refusal is said", func() bool {
		_ = refused.store.client.HVals(t.Context(), "tandem:1:x").Err()
		return strings.HasPrefix(refused.store.Refused(), "HVALS: NOPERM")
	})
	r.do("ACL", "SETUSER", "tandem", "+hvals", "+mget")

	o.TLS = nil
	c := apart(t, o, 1)
	require.ErrorContains(t, c.store.Join(context.Background(), patience), "certificate", "not signed by an authority that the system knows")
	o.TLS, o.PasswordFile = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}, filepath.Join(dir, "cert.pem")
	c = apart(t, o, 1)
	require.ErrorContains(t, c.store.Join(context.Background(), patience), "WRONGPASS")
	require.ErrorContains(t, CheckRights(t.Context(), o), "WRONGPASS")
	require.ErrorContains(t, CheckRights(t.Context(), Options{URL: "redis://127.0.0.1:1"}), "connection refused")
}

func strings2any(in []string) (out []any) {
	for _, s := range in {
		out = append(out, s)
	}
	return out
}

// certificate makes one for 127.0.0.1, signed by itself.
func certificate(t *testing.T, dir string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "redis"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	text, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cert.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "key.pem"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: text}), 0o600))
	parsed, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	out := x509.NewCertPool()
	out.AddCert(parsed)
	return out
}

// accessList is what a Redis user for Tandem has to be allowed, besides the keys that begin with the prefix and a colon. (Cluster and
// Sentinel clients ask for the topology too.)
func accessList() []string {
	return []string{
		"+xadd", "+xread", "+set", "+get", "+mget", "+unlink", "+pexpire", "+hset", "+hvals",
		"+hello", "+auth", "+select", "+ping", "+cluster|slots", "+cluster|shards", "+command",
	}
}
