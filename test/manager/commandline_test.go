package manager

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"

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
	if err := plugin.Serve(filepath.Join(p.plugins, "gpu.sock")); err != nil {
		p.Fatal(err)
	}
	p.Cleanup(plugin.Stop)
	if err := plugin.Register(p.Context(), filepath.Join(p.plugins, "kubelet.sock")); err != nil {
		p.Fatal(err)
	}
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
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		p.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	admit, err := proc.Start(proc.Cmd{Args: []string{
		shared.Program(t, "device-manager"), "admit", "-f", p.manifest("slow", 1), "-o", "podman",
		"--api-socket", filepath.Join(p.dir, "api", "manager.sock"),
	}}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = admit.Kill() })
	if err := plugin.WaitCalls(t.Context(), func(c plugintest.Calls) bool { return c.PreStart == 1 }); err != nil {
		t.Fatal(err)
	}
	if err := admit.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	<-admit.Done()
	text, err := os.ReadFile(log.Name())
	if err != nil || admit.Code() != 130 || !strings.Contains(string(text), "pod default/slow keeps its devices") ||
		!strings.Contains(string(text), "device-manager release slow") {
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
	if err := os.Chmod(p.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	p.start()
	p.plug(plugintest.New(gpu, plugintest.Devices(2)...), 2)
	program := filepath.Join(p.dir, "device-manager") // where every user can run it
	data, err := os.ReadFile(shared.Program(t, "device-manager"))
	if err != nil {
		t.Fatal(err)
	}
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
		if !strings.Contains(r.Stderr, "error: this user may not ask the device manager at "+p.dir) ||
			!strings.Contains(r.Stderr, "hint: run as root, or as a member of the manager's --api-group") {
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
	if err := json.Unmarshal([]byte(ask(0, inside, "pods", "-o", "json").Stdout), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 1 || list.Items[0].Caller.UID != user || list.Items[0].Caller.GID != user ||
		list.Items[0].Caller.PID == 0 {
		t.Errorf("the placement does not have its caller: %+v", list.Items)
	}
	ask(0, inside, "release", "theirs")
}

// TestPodResourcesOfTheProgram asks the PodResources service as monitoring agents do.
func TestPodResourcesOfTheProgram(t *testing.T) {
	t.Parallel()
	p := newProgram(t)
	p.start()
	p.plug(plugintest.New(gpu, plugintest.Devices(3)...), 3)
	p.verb(0, "admit", "-f", p.manifest("training", 2))
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.dir, "pod-resources", "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	client := podresources.NewPodResourcesListerClient(conn)
	devices := func(list []*podresources.ContainerDevices) (ids []string) {
		for _, d := range list {
			if d.ResourceName != gpu {
				t.Errorf("the resource is %q", d.ResourceName)
			}
			ids = append(ids, d.DeviceIds...)
		}
		slices.Sort(ids)
		return ids
	}
	expect := func(what string, err error, got, want any) {
		t.Helper()
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: %v, -want +got:\n%s", what, err, diff)
		}
	}
	type container struct {
		Pod, Name string
		Devices   []string
	}
	want := []container{{"default/training", "main", []string{"gpu-0000", "gpu-0001"}}}

	all, err := client.List(t.Context(), &podresources.ListPodResourcesRequest{})
	var got []container
	for _, pod := range all.GetPodResources() {
		for _, c := range pod.Containers {
			got = append(got, container{pod.Namespace + "/" + pod.Name, c.Name, devices(c.Devices)})
		}
	}
	expect("List", err, got, want)

	one, err := client.Get(
		t.Context(),
		&podresources.GetPodResourcesRequest{PodNamespace: "default", PodName: "training"},
	)
	got = nil
	for _, c := range one.GetPodResources().GetContainers() {
		got = append(got, container{"default/training", c.Name, devices(c.Devices)})
	}
	expect("Get", err, got, want)

	allocatable, err := client.GetAllocatableResources(t.Context(), &podresources.AllocatableResourcesRequest{})
	expect(
		"GetAllocatableResources",
		err,
		devices(allocatable.GetDevices()),
		[]string{"gpu-0000", "gpu-0001", "gpu-0002"},
	)

	old, err := v1alpha1.NewPodResourcesListerClient(conn).List(t.Context(), &v1alpha1.ListPodResourcesRequest{})
	got = nil
	for _, pod := range old.GetPodResources() {
		for _, c := range pod.Containers {
			var ids []string
			for _, d := range c.Devices {
				ids = append(ids, d.DeviceIds...)
			}
			slices.Sort(ids)
			got = append(got, container{pod.Namespace + "/" + pod.Name, c.Name, ids})
		}
	}
	expect("List of v1alpha1", err, got, want)

	p.verb(0, "release", "training")
	all, err = client.List(t.Context(), &podresources.ListPodResourcesRequest{})
	expect("List after the release", err, len(all.GetPodResources()), 0)
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
	if err := p.process.Kill(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(p.dir, "state", "placements.json")
	data, err := os.ReadFile(path)
	if err != nil || !bytes.Contains(data, []byte("gpu-0001")) {
		t.Fatalf("the file does not have the device: %v", err)
	}
	if err := os.WriteFile(path, bytes.ReplaceAll(data, []byte("gpu-0001"), []byte("gpu-0\x801")), 0o600); err != nil {
		t.Fatal(err)
	}

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
	if r := p.verb(1, "release", "forgotten"); !strings.Contains(r.Stderr, `there is no such pod: "forgotten"`) {
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
