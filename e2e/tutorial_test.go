package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The tutorial on one machine, pasted literally, at other ports: its commands one after the other in one bash.
func TestOneMachineTutorial(t *testing.T) {
	t.Parallel()
	redis := tool(t, "REDIS_SERVER", "redis-server", "redis-server")
	page, err := os.ReadFile("../docs/tutorial/one-machine.md")
	require.NoError(t, err)
	p := ports(t, 13)
	var places []string
	for i, port := range []string{"8101", "8102", "8201", "8202", "8080", "9002", "9003", "9090", "9012", "9013", "9091"} {
		places = append(places, "127.0.0.1:"+port, p[i])
	}
	_, redisPort, _ := strings.Cut(p[11], ":")
	places = append(places, "%?8101", "%?"+p[0], "6379", redisPort, "--listen", "--side-channel 127.0.0.1:0 --listen",
		"(cat tandem.yaml;", "cp second.yaml tandem.yaml; (cat shared.yaml;")
	places = append(places, "do sleep 1; done", "do [ $SECONDS -lt 300 ]; sleep 1; done")
	// A reader writes the configuration while the engines start.
	places = append(places, "Check it:\n", fmt.Sprintf("Check it:\n    for e in %s; do curl --retry 30 --retry-all-errors "+
		"--retry-delay 1 -s http://$e/health; done\n", strings.Join(p[:4], " ")))
	text := strings.NewReplacer(places...).Replace(string(page))
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	shown := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(text, -1)
	require.Len(t, shown, 2)
	own := fmt.Sprintf("extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q}\n", p[5], p[6], p[7])
	listens := fmt.Sprintf("envoy:\n  listen: %q\n  admin: %q\n", p[4], p[12])
	write("tandem.yaml", own+listens+shown[0][1])
	shared := strings.Replace(shown[1][1], "envoy:\n", listens, 1)
	write("shared.yaml", shared)
	write("second.yaml", own+shared)

	require.NoError(t, os.Symlink(redis, filepath.Join(dir, "redis-server")))
	out := paste(t, dir, "PATH=$PWD:$PATH\n"+strings.Join(commandsOf(text), "\n")+"\n")
	require.Regexp(t, `200 .* split +`+regexp.QuoteMeta(p[0])+`|200 .* split +`+regexp.QuoteMeta(p[1]), out)
	require.Regexp(t, `decode_alone \(cheaper than two hops\)`, out)
	require.Regexp(t, `OUT|down|out of`, out, "the killed engine")
	require.Regexp(t, `  GONE, last heard `, out, "the killed replica")
}
