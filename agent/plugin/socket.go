package plugin

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"

	"gpu-cdi-plugin/internal/unixsocket"
)

const (
	kubeletSocketName = "kubelet.sock"
	socketPrefix      = "gpu-cdi-"
	socketSuffix      = ".sock"
)

// socketPath returns the path of a resource's socket, such as DIR/gpu-cdi-nvidia-com-gpu.sock. If that is too long for
// a socket, or another resource has it, a hash takes the place of the resource's name.
func socketPath(dir, name string, taken func(path string) bool) string {
	plain := strings.NewReplacer("/", "-", ".", "-").Replace(name)
	path := filepath.Join(dir, socketPrefix+plain+socketSuffix)
	if len(path) <= unixsocket.MaxPath && !taken(path) {
		return path
	}
	return filepath.Join(dir, hashedName(name))
}

// besidePath returns the path of a resource's socket for an instance that begins while another has the planned path. No
// other resource has that path: planned names have no other dot, and names of resources no other slash.
func besidePath(planned, name string) string {
	path := strings.TrimSuffix(planned, socketSuffix) + ".2" + socketSuffix
	if len(path) <= unixsocket.MaxPath {
		return path
	}
	return filepath.Join(filepath.Dir(planned), hashedName(name+"/2"))
}

func hashedName(name string) string {
	sum := sha256.Sum256([]byte(name))
	return socketPrefix + hex.EncodeToString(sum[:8]) + socketSuffix
}

// checkLength returns ErrLongPath if the path of a socket in dir could be too long.
func checkLength(dir string) error {
	limit := unixsocket.MaxPath - len("/") - len(hashedName(""))
	if n := len(filepath.Clean(dir)); n > limit {
		return fmt.Errorf("%w: %s has %d bytes; use one of at most %d, since the path of a socket has at most %d",
			ErrLongPath, dir, n, limit, unixsocket.MaxPath)
	}
	return nil
}
