package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/hoststate"
	"gpu-cdi-plugin/test/lib/testenv"
)

// What annotations can ask for that they must not get, in each position that reads them. Nothing changes, and the
// runtime behind gpu-cdi-runtime does not run.
func TestAttackByAnnotations(t *testing.T) {
	many := func(n int) string {
		names := make([]string, n)
		for i := range names {
			names[i] = "nvidia.com/gpu=" + strconv.Itoa(i)
		}
		return strings.Join(names, ",")
	}
	for name, tc := range map[string]struct {
		policy string // a file of the node, hook.yaml if empty
		value  string
		// more are other annotations.
		more map[string]string
		want string
	}{
		"another kind":             {value: "their.com/disk=all", want: "was written by another program"},
		"another kind behind ours": {value: "nvidia.com/gpu=0,their.com/disk=all", want: "was written by another program"},
		"another annotation": {
			value: "nvidia.com/gpu=0", more: map[string]string{"cdi.k8s.io/x": "their.com/disk=all"},
			want: "was written by another program",
		},
		"all devices":               {value: "nvidia.com/gpu=all", want: "does not exist"},
		"a path":                    {value: "/etc/cdi/gpu.json", want: "want VENDOR/CLASS=NAME"},
		"a traversal as a name":     {value: "nvidia.com/gpu=../../0", want: "want VENDOR/CLASS=NAME"},
		"a traversal as a class":    {value: "nvidia.com/../gpu=0", want: "want VENDOR/CLASS=NAME"},
		"a traversal as a vendor":   {value: "../../etc/gpu=0", want: "want VENDOR/CLASS=NAME"},
		"a pattern":                 {value: "nvidia.com/gpu=*", want: "want VENDOR/CLASS=NAME"},
		"a NUL":                     {value: "nvidia.com/gpu=0\x00", want: "want VENDOR/CLASS=NAME"},
		"a line break":              {value: "nvidia.com/gpu=0\nnvidia.com/gpu=1", want: "want VENDOR/CLASS=NAME"},
		"a space":                   {value: "nvidia.com/gpu=0, nvidia.com/gpu=1", want: "want VENDOR/CLASS=NAME"},
		"no UTF-8":                  {value: "nvidia.com/gpu=\xff\xfe", want: "want VENDOR/CLASS=NAME"},
		"a letter that looks alike": {value: "nvidia.com/gрu=0", want: "want VENDOR/CLASS=NAME"},
		"nothing":                   {value: "", want: "want VENDOR/CLASS=NAME"},
		"a name of 1 MiB":           {value: "nvidia.com/gpu=" + strings.Repeat("0", 1<<20), want: "bytes, the limit is"},
		"100,000 devices":           {value: many(100_000), want: "more than"},
		// With the race detector, on a busy machine, the hook reads 100,000 in more than its 10 s.
		"20,000 annotations": {value: "nvidia.com/gpu=0", more: func() map[string]string {
			more := map[string]string{}
			for i := range 20_000 {
				more["cdi.k8s.io/"+strconv.Itoa(i)] = "nvidia.com/gpu=" + strconv.Itoa(i)
			}
			return more
		}(), want: "more than"},
		"1,000,000 commas": {value: strings.Repeat(",", 1_000_000), want: "want VENDOR/CLASS=NAME"},
		// CVE-2026-53492: a container restored from a checkpoint brings annotations that the kubelet never gave it.
		"a checkpoint": {
			policy: "allocated.yaml", value: "nvidia.com/gpu=1", want: "what the kubelet gave the container is unknown",
		},
		"a checkpoint with the names of a pod": {
			policy: "allocated.yaml", value: "nvidia.com/gpu=0", more: map[string]string{
				"io.kubernetes.cri.sandbox-namespace": "team-a", "io.kubernetes.cri.sandbox-name": "job",
				"io.kubernetes.cri.sandbox-uid": "6a70-1", "io.kubernetes.cri.container-name": "main",
			}, want: "its cgroup \"\" is not that of the pod",
		},
	} {
		for position, run := range map[string]func(*exec.Cmd, *attack, []byte){
			"createRuntime": func(cmd *exec.Cmd, a *attack, _ []byte) {
				cmd.Args, cmd.Stdin = []string{hookName, "create-runtime"}, strings.NewReader(a.state())
			},
			"precreate": func(cmd *exec.Cmd, _ *attack, config []byte) {
				cmd.Args, cmd.Stdin = []string{hookName, "precreate"}, bytes.NewReader(config)
			},
			"gpu-cdi-runtime": func(cmd *exec.Cmd, a *attack, _ []byte) {
				cmd.Args = []string{runtimeName, "create", "--bundle", a.bundle, "x"}
			},
		} {
			t.Run(name+", "+position, func(t *testing.T) {
				t.Parallel()
				a := newAttack(t)
				node := t.TempDir()
				testenv.Must(t, makeNode(node, "#!/bin/sh\ntouch "+a.outside+"/executed\n"))
				if tc.policy != "" {
					testenv.Must(t, os.Rename(filepath.Join(node, tc.policy), node+"/hook.yaml"))
				}
				a.devices, a.annotations = tc.value, tc.more
				a.start()
				config, err := os.ReadFile(a.bundle + "/config.json")
				testenv.Must(t, err)
				table := a.mountTable()
				before := hoststate.Take(t, a.outside, "/run", a.bundle, node)
				// The program of this test has the policy and the specs of a node of its own.
				path, err := exec.LookPath(hookName)
				testenv.Must(t, err)
				cmd := exec.Command(path)
				run(cmd, a, config)
				var stdout, stderr bytes.Buffer
				cmd.Stdout, cmd.Stderr, cmd.Env = &stdout, &stderr, append(os.Environ(), "NODE="+node)
				_ = cmd.Run()
				if code := cmd.ProcessState.ExitCode(); code != 1 || stdout.Len() > 0 ||
					!strings.Contains(stderr.String(), tc.want) {
					t.Errorf("status %d, %.200q: %.2000s, want %q", code, &stdout, &stderr, tc.want)
				}
				if stderr.Len() > 5000 || bytes.ContainsAny(stderr.Bytes(), "\x00\x1b") {
					t.Errorf("the message has %d bytes: %.2000q", stderr.Len(), &stderr)
				}
				if a.mountTable() != table {
					t.Error("the container has other mounts")
				}
				before.Check(t)
			})
		}
	}
}

// The environment of the image gives nothing, whatever names it has.
func TestAttackByVisibleDevices(t *testing.T) {
	a := newAttack(t)
	a.start()
	config := a.config("rootfs")
	delete(config, "annotations")
	config["process"].(map[string]any)["env"] = []string{
		"NVIDIA_VISIBLE_DEVICES=all", "CDI_DEVICES=nvidia.com/gpu=all", "cdi.k8s.io/gpu=nvidia.com/gpu=0",
	}
	a.writeJSON(a.bundle+"/config.json", config)
	before, table := hoststate.Take(t, a.outside, "/run", a.bundle), a.mountTable()
	if status, stderr := inCreateRuntime(a); status != 0 || stderr != "" {
		t.Errorf("createRuntime: status %d: %s", status, stderr)
	}
	data, err := json.Marshal(config)
	testenv.Must(t, err)
	cmd := exec.Command(hookBinary(t), "precreate")
	cmd.Stdin = bytes.NewReader(data)
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Equal(out, data) {
		t.Errorf("precreate: %v: %s", err, out)
	}
	if a.mountTable() != table {
		t.Error("the container has other mounts")
	}
	before.Check(t)
}
