package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// holders SOCKET MACHINE NAMESPACE/POD/CONTAINER=INDEX,... serves PodResources: the containers hold GPUs of the
// machine. Without containers each call returns an error.
func serveHolders(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: holders SOCKET MACHINE NAMESPACE/POD/CONTAINER=INDEX,...")
	}
	m, err := sim.LoadMachine(args[1])
	ts.Check(err)
	k := &kubelettest.PodResources{}
	for _, arg := range args[2:] {
		name, list, _ := strings.Cut(arg, "=")
		parts := strings.Split(name, "/")
		var ids []string
		for s := range strings.SplitSeq(list, ",") {
			i, err := strconv.Atoi(s)
			ts.Check(err)
			ids = append(ids, m.GPUs[i].UUID)
		}
		pod := kubelettest.Pod(parts[0], parts[1], parts[2], "nvidia.com/gpu", append(ids, "other")...)
		k.Pods = append(k.Pods, pod)
	}
	if len(k.Pods) == 0 {
		k.Err = status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	stop, err := k.Serve(ts.MkAbs(args[0]))
	ts.Check(err)
	ts.Defer(stop)
}

// twoIslands returns eight GPUs in two groups of four, with NVLinks in each group.
func twoIslands() *gpu.Snapshot {
	s := &gpu.Snapshot{}
	for i := range 8 {
		s.Devices = append(s.Devices, gpu.Device{Index: i, UUID: fmt.Sprintf("GPU-%d", i), NUMANode: i / 4})
		for j := i + 1; j < 8; j++ {
			l := gpu.Link{A: i, B: j, PCIe: gpu.PathSystem}
			if i/4 == j/4 {
				l.PCIe, l.NVLinks = gpu.PathNode, 4
			}
			s.Links = append(s.Links, l)
		}
	}
	return s
}

func TestExplanationAddsUp(t *testing.T) {
	for _, policy := range allocator.Policies() {
		for size := 1; size <= 8; size++ {
			t.Run(fmt.Sprintf("%s %d", policy, size), func(t *testing.T) {
				e, err := explainRequest(twoIslands(), &explainOptions{
					size: size, policy: policy, weights: allocator.DefaultWeights(),
				})
				testenv.Must(t, err)
				set, sum := e.Chosen, 0
				for _, p := range set.Pairs {
					sum += p.Score
				}
				if sum != set.Score || len(set.Pairs) != size*(size-1)/2 || len(set.Devices)+len(set.Left) != 8 {
					t.Errorf("the pairs' scores add up to %d: %+v", sum, set)
				}
				if e.Objective == "" {
					t.Error("the policy has no objective")
				}
			})
		}
	}
}

func TestExplanationStatesItsExactness(t *testing.T) {
	for gpus, want := range map[int]string{
		16: "All sets were compared",
		17: "The node has more than 16 GPUs, so the search is greedy",
	} {
		s := &gpu.Snapshot{}
		for i := range gpus {
			s.Devices = append(s.Devices, gpu.Device{Index: i, UUID: fmt.Sprintf("GPU-%d", i)})
		}
		e, err := explainRequest(s, &explainOptions{size: 2, policy: "topology", weights: allocator.DefaultWeights()})
		testenv.Must(t, err)
		if legend := e.view().Table.Legend; !strings.Contains(legend, want) || e.Chosen.Exact != (gpus == 16) {
			t.Errorf("%d GPUs: exact %v, legend %q, want %q", gpus, e.Chosen.Exact, legend, want)
		}
	}
}

func TestRequestsThatCannotBeFulfilledAreUsageErrors(t *testing.T) {
	const notChosen = "see --available and --must; GPUs in MIG mode are not available"
	for name, c := range map[string]struct {
		options    explainOptions
		want, hint string
	}{
		"more than there are": {
			explainOptions{size: 8},
			"7 are available",
			notChosen,
		},
		"fewer than must be": {
			explainOptions{size: 1, must: []string{"0", "1"}},
			"1 device requested, but 2 must be included",
			notChosen,
		},
		"none are available": {
			explainOptions{size: 1, available: []string{}},
			"0 are available",
			notChosen,
		},
		"must be, but is not available": {
			explainOptions{size: 1, available: []string{"GPU-1"}, must: []string{"2"}},
			`not available: "GPU2"`,
			notChosen,
		},
		"twice, by index and UUID": {
			explainOptions{size: 1, available: []string{"1", "gpu-1"}}, `listed twice: "GPU1"`, notChosen,
		},
		"no GPU": {
			explainOptions{size: 1, must: []string{"9"}},
			`--must: there is no GPU "9"`,
			"gpu-cdi-plugin devices lists the GPUs; name them by index or UUID",
		},
		"a lost GPU": {
			explainOptions{size: 1, available: []string{"7"}},
			"--available: GPU 7 cannot be used: GPU is lost",
			"leave it out, or see gpu-cdi-plugin devices",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := twoIslands()
			s.Devices[7].Error = "GPU is lost"
			c.options.policy, c.options.weights = "topology", allocator.DefaultWeights()
			_, err := explainRequest(s, &c.options)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v, want one with %q", err, c.want)
			}
			var e *cli.Error
			if !errors.As(err, &e) || e.Code != cli.Usage {
				t.Errorf("%v is no usage error", err)
			}
			if diff := cmp.Diff(c.hint, cli.HintOf(err)); diff != "" {
				t.Errorf("hint (-want +got):\n%s", diff)
			}
		})
	}
}
