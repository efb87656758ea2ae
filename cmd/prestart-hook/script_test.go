package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/test/lib/clitest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// fakeRuntime prints its arguments, and the GPUs in the bundle at the time.
const fakeRuntime = `#!/bin/sh
echo "$*"
grep -hos '/dev/nvidia[0-9]' config.json */config.json | sed 's/^/sees /'
exit 0
`

// spec has two devices of this project, by its hook.
const spec = `{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
	{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/null"}]}},
	{"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1", "hostPath": "/dev/null"}]}}
], "containerEdits": {"hooks": [{"hookName": "createContainer", "path": "/usr/bin/prestart-hook",
	"args": ["prestart-hook", "create-container", "--mask-params"], "env": ["PATH=/usr/bin"]}]}}
`

const foreignSpec = `{"cdiVersion": "0.5.0", "kind": "their.com/disk", "devices": [
	{"name": "all", "containerEdits": {"env": ["DISK=all"]}}]}
`

// makeNode writes a node's files: specs and a runtime.
func makeNode(dir, runtime string) error {
	path := filepath.Join(dir, "runtime")
	return errors.Join(os.Chmod(dir, 0o755), os.Mkdir(filepath.Join(dir, "cdi"), 0o755),
		os.WriteFile(filepath.Join(dir, "cdi/ours.json"), []byte(spec), 0o644),
		os.WriteFile(filepath.Join(dir, "cdi/theirs.json"), []byte(foreignSpec), 0o644),
		os.WriteFile(path, []byte(runtime), 0o755),
		os.WriteFile(filepath.Join(dir, "engine"), []byte("#!/bin/sh\necho engine \"$*\"\n"), 0o755),
		os.WriteFile(filepath.Join(dir, "runtime-crio.yaml"), fmt.Appendf(nil, "runtime: %s/engine\n", dir), 0o644),
		os.WriteFile(filepath.Join(dir, "allocated.yaml"), fmt.Appendf(nil, "allocated: true\nruntime: %s\n", path), 0o644),
		os.WriteFile(filepath.Join(dir, "rules.yaml"), fmt.Appendf(nil,
			"rules: [{annotations: {team: \"blue*\"}, bundle-owner: [0]}]\nruntime: %s\n", path), 0o644),
		os.WriteFile(filepath.Join(dir, "log.yaml"), fmt.Appendf(nil, "log: %s/log\nruntime: %s\n", dir, path), 0o644),
		os.WriteFile(filepath.Join(dir, "right.yaml"), fmt.Appendf(nil, "runtime: %s\n", path), 0o644),
		os.WriteFile(filepath.Join(dir, "wrong.yaml"), fmt.Appendf(nil, "kind: []\nruntime: %s\n", path), 0o644),
		os.WriteFile(filepath.Join(dir, "hook.yaml"), fmt.Appendf(nil, "runtime: %s\n", path), 0o644))
}

func TestScripts(t *testing.T) {
	needRoot(t)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Cmds:                map[string]clitest.Command{"no-dev": clitest.RunWithoutDev},
		Setup: func(env *testscript.Env) error {
			env.Setenv("NODE", env.WorkDir)
			ctx, end := context.WithCancel(t.Context())
			serve := control.Server{Dir: env.WorkDir + "/run", Handler: kubelet{}, Log: slog.New(slog.DiscardHandler)}
			done := make(chan error, 1)
			go func() { done <- serve.Run(ctx) }()
			env.Defer(func() {
				end()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
			testenv.Eventually(t, "the control socket", func() bool {
				_, err := os.Stat(control.SocketPath(serve.Dir))
				return err == nil
			})
			env.Setenv("GORACE", os.Getenv("GORACE"))
			return makeNode(env.WorkDir, fakeRuntime)
		},
	})
}

// kubelet is what "gpu-cdi-plugin serve" says that the kubelet gave: container main of pod team-a/job has GPU 0.
type kubelet struct{}

// Handle implements control.Handler.
func (kubelet) Handle(_ context.Context, r control.Request, _ func(string)) (string, error) {
	if r == (control.Request{Act: control.Allocation, Namespace: "team-a", Pod: "job", Container: "main"}) {
		return "nvidia.com/gpu=0", nil
	}
	return "", errors.New("the kubelet gave the container no device of this plugin")
}
