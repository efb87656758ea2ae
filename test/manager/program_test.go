package manager

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// program is `device-manager serve`, in directories of its own.
type program struct {
	*testing.T
	dir     string
	plugins string   // the directory of the plugins' sockets
	options []string // more options of the manager
	log     *os.File
	process *proc.Process
	api     *api.Client
}

func newProgram(t *testing.T) *program {
	t.Helper()
	dir, err := os.MkdirTemp("", "dm") //nolint:usetesting // t.TempDir may be too long for the paths of sockets
	testenv.Must(t, err)
	p := &program{
		T:       t,
		dir:     dir,
		plugins: filepath.Join(dir, "plugins"),
		api:     api.NewClient(filepath.Join(dir, "api", "manager.sock")),
	}
	if p.log, err = os.Create(filepath.Join(dir, "log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p.process != nil {
			_ = p.process.Kill()
		}
		if t.Failed() {
			log, _ := os.ReadFile(p.log.Name())
			t.Logf("the end of the log:\n%s", log[max(0, len(log)-4000):])
		}
		_ = p.log.Close()
		_ = os.RemoveAll(dir)
	})
	return p
}

// start starts the manager and returns when it answers.
func (p *program) start() {
	p.Helper()
	p.launch()
	p.await("the manager answers", func() bool {
		select {
		case <-p.process.Done():
			p.Fatalf("the manager ended with the exit status %d", p.process.Code())
		default:
		}
		_, err := p.api.Pods(p.Context())
		return err == nil
	})
}

// launch starts the manager and does not wait for it.
func (p *program) launch() {
	p.Helper()
	var err error
	p.process, err = proc.Start(proc.Cmd{Args: append([]string{
		shared.Program(p.T, "device-manager"), "serve",
		"--socket-dir", p.plugins, "--plugins-registry-dir", filepath.Join(p.dir, "registry"),
		"--state-dir", filepath.Join(p.dir, "state"), "--api-socket", filepath.Join(p.dir, "api", "manager.sock"),
		"--pod-resources-socket", filepath.Join(p.dir, "pod-resources", "kubelet.sock"),
	}, p.options...), Env: append(os.Environ(), "GOTRACEBACK=all")}, p.log)
	testenv.Must(p, err)
}

func (p *program) await(what string, ok func() bool) {
	p.Helper()
	testenv.Eventually(p.T, what, ok)
}

// allocatable is the number of healthy devices of a resource.
func (p *program) allocatable(resource string) int {
	list, err := p.api.Devices(p.Context())
	testenv.Must(p, err)
	for _, r := range list.Items {
		if r.Name == resource {
			return r.Allocatable
		}
	}
	return 0
}

// admit admits a pod whose container main has so many devices.
func (p *program) admit(ctx context.Context, uid, resource string, count int) (api.Pod, error) {
	manifest, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": uid, "uid": uid},
		"spec": map[string]any{"containers": []any{map[string]any{
			"name": "main", "image": "none", "resources": map[string]any{"limits": map[string]any{resource: count}},
		}}},
	})
	if err != nil {
		return api.Pod{}, err
	}
	return p.api.Admit(ctx, manifest)
}
