package mps

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/trust"
)

// ControlProgram is the file name of the control program, which runs serverProgram.
const (
	ControlProgram = "nvidia-cuda-mps-control"
	serverProgram  = "nvidia-cuda-mps-server"
)

// TrustCheck checks a path with `trusted`, a function of internal/trust. It may accept a path for which `trusted`
// returns an error.
type TrustCheck func(trusted func(path string) error, path string) error

// Program is nvidia-cuda-mps-control.
type Program struct {
	// Path is the program's path on the host, without links.
	Path string
	// Root is the directory in which the driver is installed. Empty means "/".
	Root string
	// Libraries are the paths of the driver's libraries that the loader does not find by itself, by file name and
	// SONAME. The loader does not get their directories: these may contain another C library than the host's.
	Libraries map[string]string

	// searchPath has the directories in which the control program searches for its server. prepare adds the driver's
	// directories.
	searchPath []string
}

// prepare completes the search path. It returns an error unless only root can change the program, its server and their
// libraries, since these run as root.
func (p *Program) prepare(check TrustCheck) error {
	files := []string{p.Path}
	dirs := []string{filepath.Dir(p.Path)}
	for _, dir := range []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		dirs = append(dirs, filepath.Join(cmp.Or(p.Root, "/"), dir))
	}
	for _, dir := range dirs {
		if check(trust.Dir, dir) == nil { // in other directories, users could put a server of their own
			p.searchPath = append(p.searchPath, dir)
		}
	}
	for _, dir := range p.searchPath {
		server := filepath.Join(dir, serverProgram)
		if _, err := os.Stat(server); err == nil {
			files = append(files, server)
			break
		}
	}
	for _, file := range slices.AppendSeq(files, maps.Values(p.Libraries)) {
		if err := check(trust.File, file); err != nil {
			return fmt.Errorf("%s is not run for MPS: %w", file, err)
		}
	}
	return nil
}

// environment returns the whole environment of the program for a GPU.
func (p *Program) environment(gpuDir string) ([]string, error) {
	env := []string{
		"CUDA_VISIBLE_DEVICES=" + filepath.Base(gpuDir),
		"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(gpuDir, pipeName),
		"CUDA_MPS_LOG_DIRECTORY=" + filepath.Join(gpuDir, daemonName), // not used: with -f the daemon prints its log
		"PATH=" + strings.Join(p.searchPath, ":"),
	}
	if len(p.Libraries) == 0 {
		return env, nil
	}
	dir, err := linkLibraries(gpuDir, p.Libraries)
	if err != nil {
		return nil, err
	}
	return append(env, "LD_LIBRARY_PATH="+dir), nil
}
