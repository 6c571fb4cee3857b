package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// One file says which version this is: the chart is in step with it, binaries and images get it by scripts/version.sh, and
// the workflow refuses a tag that differs.
func TestVersion(t *testing.T) {
	version := strings.TrimSpace(read(t, "../VERSION"))
	require.Regexp(t, `^\d+\.\d+\.\d+$`, version)
	var chart struct{ Version, AppVersion string }
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "helm/tandem/Chart.yaml")), &chart))
	require.Equal(t, version, chart.Version)
	require.Equal(t, version, chart.AppVersion)
	require.Regexp(t, `^`+regexp.QuoteMeta(version)+`(-dev(\+[0-9a-f]{12})?)?\n$`, output(t, "../scripts/version.sh"))
	require.Regexp(t, `^`+regexp.QuoteMeta(version)+`(-dev|( |-dev\+)[0-9a-f]{12} 20\d\d-\d\d-\d\d)\n$`, output(t, "../scripts/version.sh", "built"))
	for _, file := range []string{"Dockerfile", "oci.sh", "../scripts/release.sh", "../Makefile"} {
		for line := range strings.Lines(read(t, file)) {
			if strings.Contains(line, "go build") || strings.Contains(line, "$(GO) build") {
				require.Regexp(t, `-X '?main\.builtAs=\$`, line, file)
			}
		}
	}
}

// The units are what systemd itself takes, with the programs that they name.
func TestSystemdUnits(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	dir := t.TempDir()
	units, err := filepath.Glob("systemd/*.service")
	require.NoError(t, err)
	require.Len(t, units, 2)
	args := []string{"verify", "--man=no"}
	for _, unit := range units {
		text := regexp.MustCompile(`/usr/local/bin/\w+`).ReplaceAllString(read(t, unit), "/bin/true")
		copied := filepath.Join(dir, filepath.Base(unit))
		require.NoError(t, os.WriteFile(copied, []byte(text), 0o600))
		args = append(args, copied)
	}
	require.Empty(t, output(t, analyze, args...))
	broken := filepath.Join(dir, "tandem.service")
	require.NoError(t, os.WriteFile(broken, []byte(strings.Replace(read(t, broken), "NoNewPrivileges=yes", "NoNewPrivilege=yes", 1)), 0o600))
	require.Contains(t, output(t, analyze, "verify", "--man=no", broken), "NoNewPrivilege", "it would find a slip")
}
