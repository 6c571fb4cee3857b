package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The commands of docs/tutorial/inside-envoy.md, one after the other in one bash, with other ports.
func TestInsideTutorial(t *testing.T) {
	onlyInside(t)
	loadLibrary(t)
	page, err := os.ReadFile("../docs/tutorial/inside-envoy.md")
	require.NoError(t, err)
	p := ports(t, 6)
	admin, envoyAdmin := p[4], p[5]
	text := strings.NewReplacer("127.0.0.1:8101", p[0], "127.0.0.1:8201", p[1], "127.0.0.1:8202", p[2], "127.0.0.1:8080", p[3],
		"--listen", "--side-channel 127.0.0.1:0 --listen",
		"{run: inside}", "{run: inside, listen: \""+p[3]+"\", admin: \""+envoyAdmin+"\"}\nadmin: {listen: \""+admin+"\"}").Replace(string(page))
	_, config, _ := strings.Cut(text, "```yaml\n")
	config, _, _ = strings.Cut(config, "```")
	var script strings.Builder
	script.WriteString("set -e\n")
	for line := range strings.Lines(text) {
		if command, indented := strings.CutPrefix(line, "    "); indented && !strings.HasPrefix(command, "make ") {
			script.WriteString(command)
		}
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tandem.yaml"), []byte(config), 0o600))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, ".tools", "bin"), 0o700))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "bin"), 0o700))
	bin, err := binaries()
	require.NoError(t, err)
	for name, at := range map[string]string{
		"bin/tandem": filepath.Join(bin, "tandem"), "bin/enginesim": filepath.Join(bin, "enginesim"),
		"bin/libtandem.so": filepath.Join(os.Getenv("ENVOY_DYNAMIC_MODULES_SEARCH_PATH"), "libtandem.so"),
		".tools/bin/envoy": tool(t, "ENVOY", "envoy", ".tools/bin/envoy"),
	} {
		require.NoError(t, os.Symlink(at, filepath.Join(dir, name)))
	}
	bash := exec.Command("bash", "-m", "-c", script.String())
	bash.Dir = dir
	bash.Env = append(os.Environ(), "TMPDIR="+dir)
	out, err := bash.CombinedOutput()
	require.NoError(t, err, "%s\n%s", script.String(), out)
	require.Contains(t, string(out), "split")
	require.Contains(t, string(out), "\n300\n", "as the page says")
	answer, err := os.ReadFile(filepath.Join(dir, "answer.txt"))
	require.NoError(t, err)
	require.Contains(t, string(answer), `"finish_reason":"length"`)
	require.Equal(t, 1, strings.Count(string(answer), "data: [DONE]"), "%s", answer[max(0, len(answer)-1000):])
	soon(t, "nothing is left running", func() bool { return len(withTMPDIR(t, dir)) == 0 })
}
