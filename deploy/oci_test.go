package deploy

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
)

// descriptor points to a blob of an OCI image layout.
type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int64  `json:"size"`
	Platform  struct{ Architecture, OS string }
}

// archive is what deploy/oci.sh wrote, by path.
type archive map[string][]byte

// blob is what a descriptor points to, of which size and digest are as it says.
func (a archive) blob(t *testing.T, d descriptor) []byte {
	t.Helper()
	hex := fmt.Sprintf("%x", sha256.Sum256(a["blobs/sha256/"+d.Digest[len("sha256:"):]]))
	require.Equal(t, d.Digest, "sha256:"+hex)
	require.Len(t, a["blobs/sha256/"+hex], int(d.Size))
	return a["blobs/sha256/"+hex]
}

// files are those of a tar archive, and their headers.
func files(t *testing.T, text []byte) (archive, []*tar.Header) {
	t.Helper()
	out, headers := archive{}, []*tar.Header(nil)
	for r := tar.NewReader(bytes.NewReader(text)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, headers
		}
		require.NoError(t, err)
		headers = append(headers, h)
		out[h.Name], err = io.ReadAll(r)
		require.NoError(t, err)
	}
}

// The archive that is built without a daemon is an image layout of two platforms, byte for byte what its digests say; the
// container is not root and holds one static program, which serves from there alone. It takes minutes where nothing is built
// yet, so it is asked for (make deploy-check).
func TestOCIArchive(t *testing.T) {
	if os.Getenv("TANDEM_OCI") == "" {
		t.Skip("TANDEM_OCI is not set: make deploy-check")
	}
	file := filepath.Join(t.TempDir(), "tandem.tar")
	out, err := exec.CommandContext(t.Context(), "./oci.sh", file).CombinedOutput()
	require.NoError(t, err, string(out))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	layout, _ := files(t, text)
	require.JSONEq(t, `{"imageLayoutVersion": "1.0.0"}`, string(layout["oci-layout"]))
	var index struct {
		SchemaVersion int
		Manifests     []descriptor
	}
	require.NoError(t, json.Unmarshal(layout["index.json"], &index))
	require.Equal(t, 2, index.SchemaVersion)
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	require.Len(t, index.Manifests, len(machines))
	for _, m := range index.Manifests {
		require.Equal(t, "linux", m.Platform.OS)
		machine, ok := machines[m.Platform.Architecture]
		require.True(t, ok)
		delete(machines, m.Platform.Architecture)
		checkImage(t, layout, m, machine)
	}
}

func checkImage(t *testing.T, layout archive, image descriptor, machine elf.Machine) {
	t.Helper()
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	require.NoError(t, json.Unmarshal(layout.blob(t, image), &manifest))
	require.Len(t, manifest.Layers, 1)
	var config struct {
		Architecture string
		Config       struct {
			User            string
			Entrypoint, Cmd []string
			Labels          map[string]string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
	}
	require.NoError(t, json.Unmarshal(layout.blob(t, manifest.Config), &config))
	require.Equal(t, image.Platform.Architecture, config.Architecture)
	require.Equal(t, "65532:65532", config.Config.User)
	require.Equal(t, []string{"/tandem"}, config.Config.Entrypoint)
	version := strings.TrimSpace(output(t, "../scripts/version.sh"))
	require.Equal(t, version, config.Config.Labels["org.opencontainers.image.version"])
	require.Equal(t, []string{manifest.Layers[0].Digest}, config.RootFS.DiffIDs, "the layer is not compressed")

	root, headers := files(t, layout.blob(t, manifest.Layers[0]))
	var names []string
	for _, h := range headers {
		require.Zero(t, h.Mode&0o7022, "%s: set-id, or others may write", h.Name)
		require.Zero(t, h.Uid+h.Gid, "%s: the container's user owns nothing", h.Name)
		names = append(names, h.Name)
	}
	require.Equal(t, []string{"./", "./LICENSE", "./NOTICE", "./etc/", "./etc/tandem/", "./tandem"}, names)
	program, err := elf.NewFile(bytes.NewReader(root["./tandem"]))
	require.NoError(t, err)
	require.Equal(t, machine, program.Machine)
	require.Contains(t, string(root["./tandem"]), version, "the program knows its release")
	libraries, err := program.ImportedLibraries()
	require.NoError(t, err)
	require.Empty(t, libraries)
	if config.Architecture == runtime.GOARCH {
		runImage(t, root["./tandem"], append(config.Config.Entrypoint, config.Config.Cmd...))
	}
}

// runImage runs the entrypoint as a container would: as the image's user, in a root that holds the layer and a configuration,
// and in which it may write nothing. Who is not root himself runs the program where it lies.
func runImage(t *testing.T, program []byte, command []string) {
	t.Helper()
	root := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(root), 0o755))
	require.NoError(t, os.MkdirAll(filepath.Join(root, "etc/tandem"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(root, "tandem"), program, 0o755))
	addrs := loopback.Addresses(t, 3)
	config := fmt.Sprintf("extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q}\n%s", addrs[0], addrs[1], addrs[2],
		"pools: [{name: a, kvTransfer: none, endpoints: [{address: \"127.0.0.1:1\"}]}]\n")
	require.NoError(t, os.WriteFile(filepath.Join(root, "etc/tandem/tandem.yaml"), []byte(config), 0o644))

	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: 65532, Gid: 65532}}
	if os.Getuid() != 0 {
		cmd = exec.CommandContext(t.Context(), filepath.Join(root, command[0]), command[1], command[2], filepath.Join(root, command[3]))
	}
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = "/", []string{}, &said, &said
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool {
		resp, err := http.Get("http://" + addrs[2] + "/readyz")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}, time.Minute, 20*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), said.String())
}
