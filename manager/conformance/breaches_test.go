package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/test/lib/plugintest"
)

// breach is a plugin that breaks one rule.
type breach struct {
	breach func(*fake)
	rule   string
	seen   string // a part of what the report says
}

func device(f *fake, i int, change func(*v1beta1.Device)) {
	d := &v1beta1.Device{
		ID:       f.devices[i].GetID(),
		Health:   f.devices[i].GetHealth(),
		Topology: f.devices[i].GetTopology(),
	}
	change(d)
	f.devices = slices.Clone(f.devices)
	f.devices[i] = d
}

func edits(f *fake, change func(*allocated)) {
	correct := f.response
	f.response = func(ids []string) *allocated {
		r := correct(ids)
		change(r)
		return r
	}
}

// instead has Allocate give another answer to a container where the condition holds.
func instead(f *fake, answer func(ids []string) (*allocated, error), condition func(ids []string) bool) {
	f.does.Allocate = func(ctx context.Context, ids []string) (*allocated, error) {
		if condition(ids) {
			return answer(ids)
		}
		return f.allocate(ctx, ids)
	}
}

// The answers of instead.
func (f *fake) lenient(ids []string) (*allocated, error) { return f.response(ids), nil }

func busy(ids []string) (*allocated, error) { return nil, fmt.Errorf("%v are busy", ids) }

// missing has the response lack the container.
func missing([]string) (*allocated, error) { return nil, nil } //nolint:nilnil // see plugintest.Behaviour

// tooLong is longer than the time limit of a call, also on a busy machine, which notices the limit late.
const tooLong = timeout + timeout/2

func late([]string) (*allocated, error) {
	time.Sleep(tooLong)
	return &allocated{}, nil
}

// call is the condition that the call of Allocate has a number, from 1.
func (f *fake) call(number int) func([]string) bool {
	return func([]string) bool { return f.Calls().Allocate == number }
}

// lists has f run when a stream of ListAndWatch begins, with its number from 1, before its first list.
func lists(f *fake, begin func(ctx context.Context, stream int) error) {
	f.does.Watch = func(ctx context.Context) error { return begin(ctx, f.Calls().Watch) }
}

// renamed are the devices, the last one with another name.
func (f *fake) renamed() []*v1beta1.Device {
	return append(slices.Clone(f.devices[:4]), plugintest.Device("gpu-9", false))
}

func prefers(f *fake, change func(r *wanted, ids []string) []string) {
	f.does.Preferred = func(_ context.Context, r *wanted) ([]string, error) {
		ids, err := prefer(r)
		if err != nil {
			return nil, err
		}
		return change(r, ids), nil
	}
}

// optional is the place of the last device that need not be included, or -1.
func optional(r *wanted, ids []string) int {
	if len(ids) == len(r.GetMustIncludeDeviceIDs()) {
		return -1
	}
	return len(ids) - 1
}

// breaches are the plugins that break a rule, keyed by what they do. Each breaks that rule and no other.
var breaches = map[string]breach{
	"it does not register": {func(f *fake) {
		f.registered, f.registers = 1, 1
	}, "register-in-time", "no plugin registered"},
	"it registers before it serves": {func(f *fake) {
		f.registerFirst = true
	}, "register-serves-first", "no such file"},
	"another version": {func(f *fake) { f.request.Version = "v1alpha1" }, "register-version", `"v1alpha1"`},
	"a name without a domain": {func(f *fake) {
		f.request.ResourceName = "gpu"
	}, "register-name", "want VENDOR/NAME"},
	"an endpoint that is a path": {func(f *fake) {
		f.request.Endpoint = "./fake.sock"
	}, "register-endpoint", `"./fake.sock"`},
	"options that fail once": {func(f *fake) {
		f.does.GetOptions = func(context.Context) error {
			if f.Calls().Options == 1 {
				return errors.New("broken")
			}
			return nil
		}
	}, "options-answered", "broken"},
	"other options in Register": {func(f *fake) {
		f.request.Options = &v1beta1.DevicePluginOptions{}
	}, "options-agree", "PreStartContainer false"},
	"a first list that does not come": {func(f *fake) {
		lists(f, func(ctx context.Context, stream int) error {
			if stream == 1 {
				return plugintest.Hang(ctx)
			}
			return nil
		})
	}, "list-first", "none within"},
	"a stream that ends at once": {func(f *fake) {
		lists(f, func(_ context.Context, stream int) error {
			if stream == 1 {
				return errors.New("no devices yet")
			}
			return nil
		})
	}, "list-first", "no devices yet"},
	"a list of more than 4 MiB": {func(f *fake) {
		for i := range 110_000 {
			f.devices = append(f.devices, &v1beta1.Device{
				ID: fmt.Sprintf("gpu-%059d", 5+i), Health: v1beta1.Unhealthy,
			})
		}
	}, "list-size", "and the limit is 4194304"},
	"an ID of 64 bytes": {func(f *fake) {
		device(f, 0, func(d *v1beta1.Device) { d.ID = strings.Repeat("x", 64) })
	}, "list-id-length", "has 64 bytes"},
	"an ID with a comma": {func(f *fake) {
		device(f, 0, func(d *v1beta1.Device) { d.ID = "a,b" })
	}, "list-id-characters", `"a,b"`},
	"an ID that is there twice": {func(f *fake) {
		device(f, 4, func(d *v1beta1.Device) { d.ID = "gpu-5" })
		f.devices = append(f.devices, f.devices[4])
	}, "list-id-unique", `"gpu-5" is listed twice`},
	"healthy in lower case": {func(f *fake) {
		f.devices = append(f.devices, &v1beta1.Device{ID: "gpu-5", Health: "healthy"})
	}, "list-health", `"gpu-5" is "healthy"`},
	"a negative NUMA node": {func(f *fake) {
		device(f, 1, func(d *v1beta1.Device) {
			d.Topology = &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: -1}}}
		})
	}, "list-topology", "NUMA node -1"},
	"a NUMA node twice": {func(f *fake) {
		device(f, 1, func(d *v1beta1.Device) {
			d.Topology = &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: 1}, {ID: 1}}}
		})
	}, "list-topology", "NUMA node 1"},
	"an empty topology": {func(f *fake) {
		device(f, 2, func(d *v1beta1.Device) { d.Topology = &v1beta1.TopologyInfo{} })
	}, "list-topology-empty", `"gpu-2"`},
	"a second stream without a list": {func(f *fake) {
		lists(f, func(ctx context.Context, stream int) error {
			if stream == 2 {
				return plugintest.Hang(ctx)
			}
			return nil
		})
	}, "list-again", "none within"},
	"a new name for a device of a new stream": {func(f *fake) {
		lists(f, func(_ context.Context, stream int) error {
			if stream == 1 {
				f.SetDevices(f.renamed()...)
			} else {
				f.SetDevices(f.devices...)
			}
			return nil
		})
	}, "list-stable", `"gpu-9" was missing, "gpu-4" was new`},
	"one stream at a time": {func(f *fake) {
		room := make(chan struct{}, 1)
		lists(f, func(ctx context.Context, _ int) error {
			select {
			case room <- struct{}{}:
				context.AfterFunc(ctx, func() { <-room })
				return nil
			case <-time.After(timeout / 2): // an earlier stream may be about to end
				return status.Error(codes.ResourceExhausted, "one stream only")
			}
		})
		f.blind = []int{3} // it would register twice with the kubelet that starts next, and have two streams
	}, "list-twice", "one stream only"},
	"a device that is refused": {func(f *fake) {
		instead(f, busy, f.call(4))
	}, "allocate-each", "[gpu-3] are busy"},
	"an error for all devices": {func(f *fake) {
		instead(f, busy, f.call(5))
	}, "allocate-all", "busy"},
	"one answer to two containers": {func(f *fake) {
		instead(f, missing, func(ids []string) bool { return len(ids) == 3 })
	}, "allocate-count", "1 answers to a request with 2 containers"},
	"no answer to a container": {func(f *fake) {
		instead(f, missing, f.call(6))
	}, "allocate-count", "0 answers to a request with 1 containers"},
	"an answer to an unknown ID": {func(f *fake) {
		instead(f, f.lenient, func(ids []string) bool { return slices.Contains(ids, unknownID) })
	}, "allocate-unknown", "without an error"},
	"no answer to an unknown ID": {func(f *fake) {
		instead(f, late, func(ids []string) bool { return slices.Contains(ids, unknownID) })
	}, "allocate-unknown", "no answer within"},
	"an unhealthy device": {func(f *fake) {
		instead(f, f.lenient, func(ids []string) bool { return slices.Equal(ids, []string{"gpu-4"}) })
	}, "allocate-unhealthy", "without an error"},
	"no answer to a container without devices": {func(f *fake) {
		instead(f, missing, func(ids []string) bool { return len(ids) == 0 })
	}, "allocate-empty", "0 answers to a request with 1 containers"},
	"a device twice": {func(f *fake) {
		instead(f, f.lenient, func(ids []string) bool { return len(ids) == 2 && ids[0] == ids[1] })
	}, "allocate-duplicate", "twice gives"},
	"another answer each time": {func(f *fake) {
		edits(f, func(r *allocated) { r.Envs["N"] = fmt.Sprint(f.Calls().Allocate) })
	}, "allocate-same", "two answers differ"},
	"calls one at a time": {func(f *fake) {
		room := make(chan struct{}, 1)
		f.does.Allocate = func(ctx context.Context, ids []string) (*allocated, error) {
			select {
			case room <- struct{}{}:
				defer func() { <-room }()
				time.Sleep(10 * time.Millisecond) // so that others come meanwhile
				return f.allocate(ctx, ids)
			default:
				return busy(ids)
			}
		}
	}, "allocate-concurrent", "busy"},
	"a CDI name without a vendor": {func(f *fake) {
		edits(f, func(r *allocated) { r.CdiDevices = []*v1beta1.CDIDevice{{Name: "gpu=0"}} })
	}, "allocate-cdi", `"gpu=0"`},
	"a relative mount": {func(f *fake) {
		edits(f, func(r *allocated) { r.GetMounts()[0].ContainerPath = "lib" })
	}, "allocate-mounts", `"lib"`},
	"a relative node": {func(f *fake) {
		edits(f, func(r *allocated) { r.GetDevices()[0].ContainerPath = "null" })
	}, "allocate-nodes", `"null"`},
	"a node that does not exist": {func(f *fake) {
		edits(f, func(r *allocated) { r.GetDevices()[0].HostPath = "/dev/none" })
	}, "allocate-nodes-exist", "/dev/none does not exist"},
	"a node that is a file": {func(f *fake) {
		edits(f, func(r *allocated) { r.GetDevices()[0].HostPath = "/proc/version" })
	}, "allocate-nodes-exist", "is not a device node"},
	"permissions of a file": {func(f *fake) {
		edits(f, func(r *allocated) { r.GetDevices()[0].Permissions = "rwx" })
	}, "allocate-permissions", `"rwx"`},
	"a variable without a name": {func(f *fake) {
		edits(f, func(r *allocated) { r.Envs[""] = "x" })
	}, "allocate-environment", `""`},
	"an error for the preferred devices": {func(f *fake) {
		f.does.Preferred = func(context.Context, *wanted) ([]string, error) { return nil, errors.New("unimplemented") }
	}, "preferred-answered", "unimplemented"},
	"slow for many devices": {func(f *fake) {
		prefers(f, func(r *wanted, ids []string) []string {
			if len(ids) == 4 {
				time.Sleep(tooLong)
			}
			return ids
		})
	}, "preferred-answered", "no answer within"},
	"too few preferred": {func(f *fake) {
		prefers(f, func(r *wanted, ids []string) []string {
			return ids[:max(len(ids)-1, len(r.GetMustIncludeDeviceIDs()))]
		})
	}, "preferred-size", "devices are preferred"},
	"a stranger preferred": {func(f *fake) {
		prefers(f, func(r *wanted, ids []string) []string {
			if i := optional(r, ids); i >= 0 {
				ids[i] = "stranger"
			}
			return ids
		})
	}, "preferred-available", `"stranger" is not available`},
	"what must be included left out": {func(f *fake) {
		prefers(f, func(r *wanted, _ []string) []string { return r.GetAvailableDeviceIDs()[:r.GetAllocationSize()] })
	}, "preferred-included", `"gpu-3" is not included`},
	"preferred twice": {func(f *fake) {
		prefers(f, func(r *wanted, ids []string) []string {
			if i := optional(r, ids); i > 0 {
				ids[i] = ids[0]
			}
			return ids
		})
	}, "preferred-unique", "listed twice"},
	"another preference each time": {func(f *fake) {
		f.does.Preferred = func(_ context.Context, r *wanted) ([]string, error) {
			if f.Calls().Preferred%2 == 1 {
				slices.Reverse(r.GetAvailableDeviceIDs())
			}
			return prefer(r)
		}
	}, "preferred-same", "first"},
	"an impossible preference": {func(f *fake) {
		f.does.Preferred = func(_ context.Context, r *wanted) ([]string, error) {
			ids, _ := prefer(r)
			return ids, nil
		}
	}, "preferred-impossible", "without an error"},
	"a device that cannot be prepared": {func(f *fake) {
		f.does.PreStart = func(context.Context, []string) error { return errors.New("reset: busy") }
	}, "prestart-answered", "reset: busy"},
	"an unknown device prepared": {func(f *fake) {
		f.does.PreStart = func(context.Context, []string) error { return nil }
	}, "prestart-unknown", "without an error"},
	"a later list without one device": {func(f *fake) {
		f.does.Allocate = func(ctx context.Context, ids []string) (*allocated, error) {
			if f.Calls().Allocate == 1 {
				f.SetDevices(f.devices[1:]...)
			}
			return f.allocate(ctx, ids)
		}
	}, "list-full", "began with 5 devices, and a later list had 4"},
	"no answers at the end": {func(f *fake) {
		var done atomic.Bool
		f.does.GetOptions = func(context.Context) error {
			if f.Calls().Preferred > 0 && !done.Swap(true) {
				return errors.New("worn out")
			}
			return nil
		}
	}, goesOn, "worn out"},
	"one registration": {func(f *fake) { f.registers = 1 }, "restart-again", "did not register again"},
	// The first start is the first of the session, the second the next restart.
	"blind to two starts": {func(f *fake) { f.blind = []int{3, 4} }, "restart-twice", "did not register again"},
	"impatient":           {func(f *fake) { f.patience = impatience / 10 }, "restart-later", "did not register again"},
	"a socket that is not created again": {func(f *fake) {
		f.keepSocket = true
	}, "restart-cleaned", "again"}, // it did not register again, or did and has no list
	"new names after a restart": {func(f *fake) {
		lists(f, func(_ context.Context, stream int) error {
			if stream > 3 {
				f.SetDevices(f.renamed()...)
			}
			return nil
		})
	}, "restart-same", `"gpu-4" was missing, "gpu-9" was new`},
}

// endings break rules of processes: they run as commands.
var endings = map[string]breach{
	"an exit status":       {func(f *fake) { f.exit = 3 }, "end-exit", "exit status 3"},
	"a socket that stays":  {func(f *fake) { f.leaveSocket = true }, "end-socket", "left fake.sock"},
	"a crash at a request": {crash, goesOn, "ended by itself (exit status 7) while allocate-empty"},
}

// introductions break rules of the registry: they run as commands that have one.
var introductions = map[string]breach{
	"no socket in the registry": {func(f *fake) { f.dir += "/none" }, "watcher-in-time", "no socket in"},
	"no answer to GetInfo": {func(f *fake) {
		f.does.Info = func(context.Context) (*pluginregistration.PluginInfo, error) { return nil, errors.New("who?") }
	}, "watcher-info", "who?"},
	"another type":            {func(f *fake) { f.info.Type = "CSIPlugin" }, "watcher-type", `type "CSIPlugin"`},
	"a name without a vendor": {func(f *fake) { f.info.Name = "gpu" }, "watcher-name", "want VENDOR/NAME"},
	"another version of GetInfo": {func(f *fake) {
		f.info.SupportedVersions = []string{"v1"}
	}, "watcher-versions", `versions ["v1"]`},
	"a relative endpoint": {func(f *fake) {
		f.info.Endpoint = "fake.sock"
	}, "watcher-endpoint", `endpoint "fake.sock"`},
	"an endpoint that nothing serves": {func(f *fake) {
		f.info.Endpoint = "/none.sock"
	}, "options-answered", "no answer within"},
	"no answer to a success": {func(f *fake) {
		f.does.Notify = func(_ context.Context, s *pluginregistration.RegistrationStatus) error {
			if s.GetPluginRegistered() {
				return errors.New("unimplemented")
			}
			return nil
		}
	}, "watcher-notified", "unimplemented"},
	"an end at a failure": {func(f *fake) {
		f.does.Notify = func(_ context.Context, s *pluginregistration.RegistrationStatus) error {
			if !s.GetPluginRegistered() {
				os.Exit(7)
			}
			return nil
		}
	}, "watcher-refused", "Unavailable"},
	"a socket that is not made again": {func(f *fake) { f.keepSocket = true }, "watcher-again", "no socket in the new"},
}

func crash(f *fake) {
	f.does.Allocate = func(ctx context.Context, ids []string) (*allocated, error) {
		if len(ids) == 0 {
			os.Exit(7)
		}
		return f.allocate(ctx, ids)
	}
}

func init() {
	maps.Copy(breaches, endings)
	maps.Copy(breaches, introductions)
}

// impatience is the time limit of the checks of an impatient plugin. Of it, a tenth is more than a short restart of the
// kubelet takes on a busy machine, and a long one is a fifth.
const impatience = 2 * timeout

// follows are rules that are broken too where another one is.
var follows = map[string][]string{
	// A plugin that does not come back once does not come back later.
	"one registration":     {"restart-twice", "restart-later", "restart-cleaned"},
	"impatient":            {"restart-cleaned"},
	"a crash at a request": {"allocate-empty"},
	"an end at a failure":  {goesOn},
	// Nothing answers there.
	"an endpoint that nothing serves": {"list-first", "list-twice", "allocate-empty", goesOn},
}
