package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// command runs a command of Tandem at a replica.
func (f *fleet) command(replica int, args ...string) string {
	bin, _ := binaries()
	c := exec.Command(filepath.Join(bin, "tandem"), append(args, "--admin", strings.TrimPrefix(f.admins[replica], "http://"))...)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	require.NoError(f.t, c.Run(), out.String())
	return out.String()
}

// Replicas with different ticket keys refuse each other's tickets. What they show names the keys, and no engine: with a
// key file each, and where one replica has its key from Redis and the other does not use Redis yet.
func TestTicketsOfOtherKeys(t *testing.T) {
	t.Parallel()
	t.Run("key files", func(t *testing.T) {
		t.Parallel()
		f := start(t, options{replicas: 2, separateKeys: true})
		other := strings.Repeat("fedcba9876543210", 4)
		require.NoError(t, os.WriteFile(filepath.Join(f.dir, "ticket-1.key"), []byte(other+"\n"), 0o600))
		f.said(1, "ticket keys changed", 1)
		f.refuseTickets()
	})
	t.Run("one without Redis", func(t *testing.T) {
		t.Parallel()
		r := startRedis(t)
		f := start(t, options{replicas: 2, madeKeys: true, top: r.yaml()})
		f.rewrite(f.fileOf(1), r.yaml(), fmt.Sprintf("tickets: {keyFile: %q}\n", filepath.Join(f.dir, "ticket.key")))
		f.tandems[1].stop(syscall.SIGTERM)
		f.startTandem(1, f.fileOf(1), f.admins[1])
		f.envoyFinds()
		f.refuseTickets()
	})
}

// refuseTickets sends requests until some tickets were refused, and looks at what both replicas show.
func (f *fleet) refuseTickets() {
	t := f.t
	refused := 0
	for i := 0; refused < 8; i++ {
		require.Less(t, i, 200, "no ticket was refused")
		a := f.post("/v1/chat/completions", chat(fmt.Sprintf("request %d ", i)+strings.Repeat("word ", 200)))
		if a.status != 200 {
			require.Equal(t, 503, a.status)
			require.Contains(t, a.body, `"code":"ticket_refused"`)
			refused++
		}
	}
	rows := regexp.MustCompile(`(?m)^  503, ticket refused .* (\S+)$`)
	soon(t, "the requests' rows say it", func() bool {
		return len(rows.FindAllString(f.command(0, "requests", "--failed")+f.command(1, "requests", "--failed"), -1)) == refused
	})
	for i := range f.admins {
		status := f.command(i, "status")
		require.Regexp(t, `PROBLEM  \d+ tickets? (was|were) refused in the last minute, .*#tickets-are-refused`, status)
		require.NotContains(t, status, "requests failed in the last minute")
		require.NotContains(t, status, "hops failed")
		require.NotContains(t, status, "OUT")
		if row := rows.FindStringSubmatch(f.command(i, "requests", "--failed")); row != nil {
			require.Contains(t, f.command(i, "explain", row[1]), "Its ticket was refused: ")
		}
	}
}
