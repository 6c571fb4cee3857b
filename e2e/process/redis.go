package process

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"
)

// StartRedis starts a Redis that keeps nothing on disk, and returns its address. It is $REDIS_SERVER, redis-server on
// PATH, or .tools/bin/redis-server.
func (g *Group) StartRedis(ctx context.Context, name string) (*Process, string, error) {
	path := cmp.Or(os.Getenv("REDIS_SERVER"), "redis-server")
	if _, err := exec.LookPath(path); err != nil {
		path = ".tools/bin/redis-server"
	}
	ports, err := FreePorts(1)
	if err != nil {
		return nil, "", err
	}
	p, err := g.Start(name+"-redis", nil, path, "--bind", "127.0.0.1", "--port",
		ports[0][strings.LastIndexByte(ports[0], ':')+1:], "--save", "", "--appendonly", "no", "--dir", g.Dir)
	if err != nil {
		return nil, "", err
	}
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", ports[0])
		if err == nil {
			return p, ports[0], conn.Close()
		}
		if _, gone := p.CPU(); gone != nil || ctx.Err() != nil {
			return nil, "", fmt.Errorf("redis-server does not accept connections: %w", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
