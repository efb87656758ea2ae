package manager

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

const gpu = "example.com/gpu"

// plug has a plugin serve devices, and register. It does so again after a restart of the manager.
func (p *program) plug(plugin *plugintest.Plugin, devices int) {
	p.Helper()
	plugin.Stop()
	testenv.Must(p, plugin.Serve(filepath.Join(p.plugins, "gpu.sock")))
	p.Cleanup(plugin.Stop)
	testenv.Must(p, plugin.Register(p.Context(), filepath.Join(p.plugins, "kubelet.sock")))
	p.await("the devices are counted", func() bool { return p.allocatable(gpu) == devices })
}

// verb runs a verb that asks the manager.
func (p *program) verb(code int, args ...string) proc.Result {
	p.Helper()
	args = append(args, "--api-socket", filepath.Join(p.dir, "api", "manager.sock"))
	return proc.Must(p, code, proc.Cmd{Args: append([]string{shared.Program(p.T, "device-manager")}, args...)})
}

// manifest writes the manifest of a pod with a container main.
func (p *program) manifest(name string, count int) string {
	p.Helper()
	path := filepath.Join(p.dir, name+".json")
	text := fmt.Sprintf(
		`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": %q, "uid": %[1]q}, "spec": {"containers": [`+
			`{"name": "main", "resources": {"limits": {%q: %d}}}]}}`,
		name,
		gpu,
		count,
	)
	testenv.Must(p, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// TestAHostileAnswerIsNotPrinted has a plugin answer Allocate with what would put an option or a file of the host into
// a container. No format prints it, and the pod can be released as the error says.
func TestAHostileAnswerIsNotPrinted(t *testing.T) {
	t.Parallel()
	p := newProgram(t)
	p.start()
	plugin := plugintest.New(gpu, plugintest.Devices(1)...)
	p.plug(plugin, 1)
	plugin.Behave(plugintest.Behaviour{
		Allocate: func(context.Context, []string) (*v1beta1.ContainerAllocateResponse, error) {
			return &v1beta1.ContainerAllocateResponse{
				Envs:   map[string]string{"A\n--privileged": "1"},
				Mounts: []*v1beta1.Mount{{HostPath: "../..", ContainerPath: "/host"}},
			}, nil
		},
	})
	manifest := p.manifest("hostile", 1)
	for _, format := range []string{"json", "yaml", "table", "name", "podman", "docker", "nerdctl"} {
		r := p.verb(1, "admit", "-f", manifest, "--start", "-o", format)
		for _, want := range []string{
			"start container main of pod default/hostile", "the plugin of " + gpu, `host path of a mount "../.."`,
			"pod default/hostile keeps its devices", " release hostile",
		} {
			if r.Stdout != "" || !strings.Contains(strings.ReplaceAll(r.Stderr, `\"`, `"`), want) {
				t.Errorf("-o %s: want nothing, and an error with %q, got %v", format, want, r)
			}
		}
	}
	p.verb(0, "release", "hostile")
}

// TestAnInterruptedAdmissionSaysThatThePodIsPlaced interrupts admit while the plugin prepares a device.
func TestAnInterruptedAdmissionSaysThatThePodIsPlaced(t *testing.T) {
	t.Parallel()
	p := newProgram(t)
	p.start()
	plugin := plugintest.New(gpu, plugintest.Devices(1)...)
	plugin.Behave(plugintest.Behaviour{
		Options:  &v1beta1.DevicePluginOptions{PreStartRequired: true},
		PreStart: func(ctx context.Context, _ []string) error { return plugintest.Hang(ctx) },
	})
	p.plug(plugin, 1)
	log, err := os.Create(filepath.Join(p.dir, "admit.log"))
	testenv.Must(t, err)
	defer log.Close()
	admit, err := proc.Start(proc.Cmd{Args: []string{
		shared.Program(t, "device-manager"), "admit", "-f", p.manifest("slow", 1), "-o", "podman",
		"--api-socket", filepath.Join(p.dir, "api", "manager.sock"),
	}}, log)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = admit.Kill() })
	testenv.Must(t, plugin.WaitCalls(t.Context(), func(c plugintest.Calls) bool { return c.PreStart == 1 }))
	testenv.Must(t, admit.Signal(syscall.SIGINT))
	<-admit.Done()
	text, err := os.ReadFile(log.Name())
	if err != nil || admit.Code() != 130 || !strings.Contains(string(text), "pod default/slow keeps its devices") ||
		!strings.Contains(string(text), "/manager.sock release slow") {
		t.Errorf("exit status %d, %v: %s", admit.Code(), err, text)
	}
	p.verb(0, "release", "slow")
}

// TestTheGroupMayAsk has users ask who are in the group of --api-group, and who are not.
func TestTheGroupMayAsk(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	setpriv := testenv.Command(t, "setpriv")
	const user, group = 54321, 54322
	p := newProgram(t)
	p.options = []string{"--api-group", strconv.Itoa(group)}
	testenv.Must(t, os.Chmod(p.dir, 0o755))
	p.start()
	p.plug(plugintest.New(gpu, plugintest.Devices(2)...), 2)
	program := filepath.Join(p.dir, "device-manager") // where every user can run it
	data, err := os.ReadFile(shared.Program(t, "device-manager"))
	testenv.Must(t, err)
	testenv.WriteProgram(t, program, data)
	manifest := p.manifest("theirs", 1)
	ask := func(code int, groups []string, verb ...string) proc.Result {
		t.Helper()
		args := append([]string{setpriv, "--reuid", strconv.Itoa(user)}, groups...)
		args = append(append(args, program), verb...)
		args = append(args, "--api-socket", filepath.Join(p.dir, "api", "manager.sock"))
		return proc.Must(t, code, proc.Cmd{Args: args})
	}
	outside := []string{"--regid", strconv.Itoa(user), "--clear-groups"}
	for _, verb := range [][]string{
		{"pods"}, {"node"}, {"admit", "-f", manifest}, {"release", "theirs"}, {"release", "--withheld", "--all"},
	} {
		r := ask(1, outside, verb...)
		if !strings.Contains(r.Stderr, "error: this user may not use the device manager at "+p.dir) ||
			!strings.Contains(r.Stderr, "hint: run as root, or as a member of the group that may use this socket: "+
				"--api-group, ") {
			t.Errorf("outside the group %v: %v", verb, r)
		}
	}
	if pods, err := p.api.Pods(t.Context()); err != nil || len(pods) > 0 {
		t.Errorf("a user outside the group placed %v (%v)", pods, err)
	}
	// The group may be a supplementary one; the kernel reports the primary one.
	ask(0, []string{"--regid", strconv.Itoa(user), "--groups", strconv.Itoa(group)}, "admit", "-f", manifest)
	var list api.PodList
	inside := []string{"--regid", strconv.Itoa(group), "--clear-groups"}
	testenv.Must(t, json.Unmarshal([]byte(ask(0, inside, "pods", "-o", "json").Stdout), &list))
	if len(list.Items) != 1 || list.Items[0].Caller.UID != user || list.Items[0].Caller.GID != user ||
		list.Items[0].Caller.PID == 0 {
		t.Errorf("the placement does not have its caller: %+v", list.Items)
	}
	ask(0, inside, "release", "theirs")
}

// TestDamageIsRepairedOnTheCommandLine damages the state while the manager is down. All devices are withheld until they
// are released.
func TestDamageIsRepairedOnTheCommandLine(t *testing.T) {
	t.Parallel()
	p := newProgram(t)
	p.start()
	plugin := plugintest.New(gpu, plugintest.Devices(4)...)
	p.plug(plugin, 4)
	p.verb(0, "admit", "-f", p.manifest("forgotten", 2))
	testenv.Must(t, p.process.Kill())
	path := filepath.Join(p.dir, "state", "placements.json")
	data, err := os.ReadFile(path)
	if err != nil || !bytes.Contains(data, []byte("gpu-0001")) {
		t.Fatalf("the file does not have the device: %v", err)
	}
	testenv.Must(t, os.WriteFile(path, bytes.ReplaceAll(data, []byte("gpu-0001"), []byte("gpu-0\x801")), 0o600))

	p.start()
	p.plug(plugin, 0)
	list := p.verb(0, "node", "--devices")
	if strings.Count(list.Stdout, "Healthy, withheld") != 4 {
		t.Errorf("not all devices are withheld: %s", list.Stdout)
	}
	if !strings.Contains(list.Stderr, "release --withheld") || !strings.Contains(list.Stderr, ".damaged-") {
		t.Errorf("the list does not say why: %s", list.Stderr)
	}
	r := p.verb(1, "admit", "-f", p.manifest("next", 1))
	if !strings.Contains(r.Stderr, "Requested: 1, Available: 0") {
		t.Errorf("a pod got a withheld device: %v", r)
	}
	const unknown = `find the pod: no placed pod has the name or UID "forgotten"`
	if r := p.verb(1, "release", "forgotten"); !strings.Contains(r.Stderr, unknown) {
		t.Errorf("the damaged pod: %v", r)
	}
	r = p.verb(0, "release", "--withheld", gpu+"=gpu-0002")
	if r.Stdout != "not withheld any more: "+gpu+"=gpu-0002\n" {
		t.Errorf("release of a device: %v", r)
	}
	if r := p.verb(0, "admit", "-f", p.manifest("next", 1)); !strings.Contains(r.Stdout, "gpu-0002") {
		t.Errorf("the released device is not given: %v", r)
	}
	if r := p.verb(0, "release", "--withheld", "--all"); r.Stdout != "no device is withheld any more\n" {
		t.Errorf("release of all: %v", r)
	}
	p.verb(0, "admit", "-f", p.manifest("last", 3))
	if list := p.verb(0, "node", "--devices"); strings.Contains(list.Stdout+list.Stderr, "withheld") ||
		strings.Count(list.Stdout, "default/") != 4 {
		t.Errorf("not all devices are given: %v", list)
	}
}
