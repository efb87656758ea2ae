package dra

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/apiservertest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// nodeOf returns the state of a node with so many GPUs.
func nodeOf(t testing.TB, count int) *node.State {
	t.Helper()
	s := &gpu.Snapshot{DriverVersion: "580.1"}
	for i := range count {
		s.Devices = append(s.Devices, gpu.Device{Index: i, UUID: fmt.Sprintf("GPU-%d", i)})
	}
	return stateOf(t, s, resource.Config{})
}

// withHealth returns slices of a state in which one GPU has another health.
func withHealth(s *node.State, i int, h health.Status) []Slice {
	changed := *s
	changed.Health = maps.Clone(s.Health)
	uuid := s.Snapshot.Devices[i].UUID
	h.UUID = uuid
	changed.Health[uuid] = h
	return slicesOf(&changed)
}

func slicesOf(s *node.State) []Slice {
	list, _ := Slices(Identity{DefaultDriver, apiservertest.Node}, s, nil)
	return list
}

// run runs an actor until the test ends.
func run(t testing.TB, actor func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- actor(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// publishing returns a Publisher that runs, and what it logs.
func publishing(t testing.TB, server *apiservertest.Server) (*Publisher, *testenv.Log) {
	t.Helper()
	c, err := apiserver.New(apiserver.Options{Credentials: server.Dir, Env: server.Env(), Timeout: 10 * time.Second})
	testenv.Must(t, err)
	log := &testenv.Log{}
	p := NewPublisher(c, Identity{DefaultDriver, c.Node}, slog.New(slog.NewTextHandler(log, nil)))
	run(t, p.Run)
	return p, log
}

// published reports whether the API server has the slices, with one generation and the Node as the owner.
func isPublished(server *apiservertest.Server, want []Slice) bool {
	var got []Slice
	server.Slices(&got)
	return slices.EqualFunc(want, got, func(a, b Slice) bool {
		a.Spec.Pool.Generation = got[0].Spec.Pool.Generation
		owner := Owner{"v1", "Node", apiservertest.Node, apiservertest.NodeUID, true}
		return a.Metadata.Name == b.Metadata.Name && same(a.Spec, b.Spec) && slices.Equal(b.Metadata.Owners, []Owner{owner})
	})
}

func awaitPublished(t testing.TB, server *apiservertest.Server, want []Slice) {
	t.Helper()
	testenv.Eventually(t, "the slices are published", func() bool { return isPublished(server, want) })
}

const first, second = "gpu-node-1-gpu.nvidia.com-0", "gpu-node-1-gpu.nvidia.com-1"

func TestOnlyDifferencesAreWritten(t *testing.T) {
	t.Parallel()
	since := time.Now()
	small, large := nodeOf(t, 2), nodeOf(t, 70)
	unhealthy := health.Status{State: health.Unhealthy, Reason: "XID 79", Since: since}
	later := unhealthy
	later.Since = since.Add(time.Hour)
	for name, c := range map[string]struct {
		states [][]Slice
		want   []string // what the last state needs
	}{
		"the first one": {[][]Slice{slicesOf(small)}, []string{"create " + first + " (generation 1)"}},
		"two slices": {[][]Slice{slicesOf(large)}, []string{
			"create " + first + " (generation 1)", "create " + second + " (generation 1)",
		}},
		"a taint keeps the generation": {
			[][]Slice{slicesOf(large), withHealth(large, 69, unhealthy)}, []string{"update " + second + " (generation 1)"},
		},
		"a taint that goes": {
			[][]Slice{withHealth(small, 0, unhealthy), slicesOf(small)}, []string{"update " + first + " (generation 1)"},
		},
		"the time of a taint is no difference": {
			[][]Slice{withHealth(small, 0, unhealthy), withHealth(small, 0, later)}, nil,
		},
		"more devices": {[][]Slice{slicesOf(small), slicesOf(large)}, []string{
			"update " + first + " (generation 2)", "create " + second + " (generation 2)",
		}},
		"fewer devices": {[][]Slice{slicesOf(large), slicesOf(small)}, []string{
			"delete " + second, "update " + first + " (generation 1)",
		}},
		"none at all": {[][]Slice{slicesOf(large), nil}, []string{"delete " + first, "delete " + second}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := apiservertest.New(t)
			p, _ := publishing(t, server)
			for _, list := range c.states[:len(c.states)-1] {
				p.Publish(list, nil)
				awaitPublished(t, server, list)
				server.Writes()
			}
			last := c.states[len(c.states)-1]
			p.Publish(last, nil)
			awaitPublished(t, server, last)
			if diff := cmp.Diff(c.want, server.Writes()); diff != "" {
				t.Errorf("writes (-want +got)\n%s", diff)
			}
		})
	}
}

// A process that was killed between two requests leaves a pool that no consumer uses.
func TestAnInterruptedChangeIsCompleted(t *testing.T) {
	t.Parallel()
	desired := slicesOf(nodeOf(t, 70))
	at := func(generation int64, s Slice) Slice {
		s.Spec.Pool.Generation = generation
		return s
	}
	other := desired[0]
	other.Metadata.Name, other.Spec.Pool.Name = "other", "other"
	for name, c := range map[string]struct {
		existing []Slice
		want     []string
	}{
		"one has the older generation": {[]Slice{at(2, desired[0]), at(1, desired[1])}, []string{"PUT 1 2"}},
		"one is missing":               {[]Slice{at(2, desired[0])}, []string{"PUT 0 3", "POST 1 3"}},
		"both differ": {
			[]Slice{at(4, Slice{Metadata: desired[0].Metadata}), at(4, Slice{Metadata: desired[1].Metadata})},
			[]string{"PUT 0 5", "PUT 1 5"},
		},
		"one of another pool": {
			[]Slice{at(1, desired[0]), at(1, desired[1]), at(1, other)}, []string{"DELETE other 1"},
		},
		"nothing is missing": {[]Slice{at(3, desired[0]), at(3, desired[1])}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []string
			for _, w := range planWrites(desired, c.existing) {
				got = append(got, fmt.Sprintf("%s %s %d", w.method,
					strings.TrimPrefix(w.slice.Metadata.Name, "gpu-node-1-gpu.nvidia.com-"), w.slice.Spec.Pool.Generation))
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestSlicesComeBack(t *testing.T) {
	t.Parallel()
	desired := slicesOf(nodeOf(t, 70))
	for name, harm := range map[string]func(*apiservertest.Server){
		"the kubelet deletes them": func(s *apiservertest.Server) {
			s.DeleteSlice(first)
			s.DeleteSlice(second)
		},
		"one is changed": func(s *apiservertest.Server) {
			s.PutSlice(map[string]any{
				"metadata": map[string]any{"name": first},
				"spec":     map[string]any{"driver": DefaultDriver, "nodeName": apiservertest.Node},
			})
		},
		"one too many": func(s *apiservertest.Server) {
			s.PutSlice(map[string]any{
				"metadata": map[string]any{"name": "old"},
				"spec":     map[string]any{"driver": DefaultDriver, "nodeName": apiservertest.Node},
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := apiservertest.New(t)
			p, log := publishing(t, server)
			p.Publish(desired, nil)
			awaitPublished(t, server, desired)
			harm(server)
			awaitPublished(t, server, desired)
			testenv.Eventually(t, "there is no remark", func() bool { return p.Reason() == "" })
			if strings.Contains(log.String(), "level=WARN") {
				t.Errorf("it is logged:\n%s", log)
			}
		})
	}
	t.Run("those of others are left alone", func(t *testing.T) {
		t.Parallel()
		server := apiservertest.New(t)
		for i, spec := range []map[string]any{
			{"driver": "other", "nodeName": apiservertest.Node}, {"driver": DefaultDriver, "nodeName": "gpu-node-2"},
		} {
			server.PutSlice(map[string]any{"metadata": map[string]any{"name": fmt.Sprint("z", i)}, "spec": spec})
		}
		p, _ := publishing(t, server)
		p.Publish(nil, nil)
		p.Publish(desired, nil)
		testenv.Eventually(t, "four slices", func() bool {
			var got []Slice
			server.Slices(&got)
			return len(got) == 4
		})
	})
}

// The slices of an earlier process stay until the node was read.
func TestNothingIsDeletedBeforeTheFirstState(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := NewPublisher(nil, onNode, slog.New(slog.NewTextHandler(t.Output(), nil)))
		run(t, p.Run)
		time.Sleep(time.Hour) // a request would panic
		synctest.Wait()
	})
}

// script is an API server whose answers the test gives.
type script struct {
	get   func(into any) error
	watch func(ctx context.Context) error
	gets  int
	sends int
}

func (s *script) Get(_ context.Context, path string, into any) error {
	s.gets++
	if strings.HasPrefix(path, "/api/v1/nodes/") {
		return nil
	}
	return s.get(into)
}

func (s *script) Send(context.Context, string, string, string, any) error {
	s.sends++
	return nil
}

func (s *script) AwaitChange(ctx context.Context, _ string, _ time.Duration) error {
	return s.watch(ctx)
}

func empty(any) error { return nil }

func forever(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func TestABadAPIServerIsCalledSeldom(t *testing.T) {
	t.Parallel()
	away := errors.New("call the API server: connection refused")
	shared, unshared := slicesOf(nodeOf(t, 1)), slicesOf(nodeOf(t, 1))
	shared[0].Spec.Devices[0].Shared = true
	for name, c := range map[string]struct {
		api    script
		slices []Slice
		calls  [2]int // the least and the most requests in an hour
		reason string
	}{
		"it is away": {
			script{get: func(any) error { return away }},
			nil,
			[2]int{120, 400},
			"list the ResourceSlices of node gpu-node-1: call the API server: connection refused",
		},
		"it has no DRA": {
			script{get: func(any) error { return &apiserver.StatusError{Code: http.StatusNotFound, Message: "not found"} }},
			nil,
			[2]int{120, 400},
			"Kubernetes has since 1.34: the API server answers 404: not found",
		},
		"its watches fail": {
			script{get: empty, watch: func(context.Context) error { return away }},
			nil,
			[2]int{120, 400},
			"watch the ResourceSlices of node gpu-node-1",
		},
		"its watches end at once": {
			script{get: empty, watch: func(context.Context) error { return nil }}, nil, [2]int{3000, 3700}, "",
		},
		"its versions are too old at once": {
			script{get: empty, watch: func(context.Context) error { return &apiserver.StatusError{Code: http.StatusGone} }},
			nil,
			[2]int{3000, 3700},
			"",
		},
		"another program deletes the slices": {
			script{get: empty}, slicesOf(nodeOf(t, 1)), [2]int{700, 2500}, "does another DRA driver with this name run",
		},
		"another program deletes the slices of shared devices": {
			script{get: empty}, shared, [2]int{700, 2500}, "does another DRA driver with this name run",
		},
		"it has no shared devices": {
			script{get: func(into any) error {
				data, err := json.Marshal(map[string]any{"items": unshared})
				return errors.Join(err, json.Unmarshal(data, into))
			}}, shared, [2]int{400, 2500}, "it needs Kubernetes 1.36",
		},
		"all is well": {script{get: empty, watch: forever}, nil, [2]int{1, 1}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				log := &testenv.Log{}
				p := NewPublisher(&c.api, onNode, slog.New(slog.NewTextHandler(log, nil)))
				p.Publish(c.slices, nil)
				stop := run(t, p.Run)
				time.Sleep(time.Hour)
				synctest.Wait()
				if n := c.api.gets; n < c.calls[0] || n > c.calls[1] {
					t.Errorf("%d requests in an hour, want %v", n, c.calls)
				}
				if !strings.Contains(p.Reason(), c.reason) || (c.reason == "") != (p.Reason() == "") {
					t.Errorf("the reason is %q, want %q", p.Reason(), c.reason)
				}
				stop()
				if n := strings.Count(log.String(), "level=WARN"); n > 1 {
					t.Errorf("%d warnings:\n%s", n, log)
				}
			})
		})
	}
}

func TestTheAPIServerIsAwayForAWhile(t *testing.T) {
	t.Parallel()
	server := apiservertest.New(t)
	server.Instead(func(w http.ResponseWriter, _ *http.Request) {
		apiservertest.Fail(w, http.StatusInternalServerError, "etcdserver: leader changed")
	})
	p, log := publishing(t, server)
	desired := slicesOf(nodeOf(t, 1))
	p.Publish(desired, nil)
	testenv.Eventually(t, "the reason", func() bool { return strings.Contains(p.Reason(), "leader changed") })
	server.Instead(nil)
	awaitPublished(t, server, desired)
	testenv.Eventually(t, "the end of the reason", func() bool { return p.Reason() == "" })
	if !strings.Contains(log.String(), "the ResourceSlices of the node are published") {
		t.Errorf("the log:\n%s", log)
	}
}

// A node on which the scheduler still sees devices of the device plugin gets no slices, but loses those of devices that
// are gone.
func TestSlicesWaitForTheDevicePlugin(t *testing.T) {
	t.Parallel()
	server := apiservertest.New(t)
	server.SetAllocatable(map[string]string{"nvidia.com/gpu": "2", "cpu": "8"})
	p, log := publishing(t, server)
	desired := slicesOf(nodeOf(t, 2))
	p.Publish(desired, []string{"nvidia.com/other", "nvidia.com/gpu"})
	const why = "the Node still has 2 allocatable nvidia.com/gpu of a device plugin: slices are created once"
	testenv.Eventually(t, "the reason", func() bool { return strings.Contains(p.Reason(), why) })
	if p.withdrawn() || len(server.Writes()) > 0 {
		t.Errorf("slices are written:\n%s", log)
	}
	server.SetAllocatable(map[string]string{"nvidia.com/gpu": "0", "cpu": "8"})
	awaitPublished(t, server, desired)
	testenv.Eventually(t, "there is no remark", func() bool { return p.Reason() == "" })

	server.SetAllocatable(map[string]string{"nvidia.com/gpu": "2"})
	p.Publish(nil, nil)
	awaitPublished(t, server, nil)
	testenv.Eventually(t, "the slices are withdrawn", p.withdrawn)
}
