package conformance

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// trial is a call of GetPreferredAllocation for one container, with its response.
type trial struct {
	available, include []string
	size               int
	got                []string
}

func (t trial) String() string {
	return fmt.Sprintf("%d of %d devices, %d of them required", t.size, len(t.available), len(t.include))
}

// prefer calls GetPreferredAllocation for one container.
func (p *plugin) prefer(ctx context.Context, t trial) (*v1beta1.PreferredAllocationResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	return p.client.GetPreferredAllocation(ctx, &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: t.available, MustIncludeDeviceIDs: t.include, AllocationSize: int32(t.size),
		}},
	})
}

// preferring returns a check that needs a plugin that advertises GetPreferredAllocation.
func preferring(f func(context.Context, *plugin) verdict) check {
	return allocating(func(ctx context.Context, p *plugin, _ []string) verdict {
		if !p.options.GetGetPreferredAllocationAvailable() {
			return skipped("the plugin does not advertise GetPreferredAllocation")
		}
		return f(ctx, p)
	})
}

// preferredAnswers makes the calls whose responses the other checks use. They request few, half and all of the
// devices, with and without devices that must be included.
func preferredAnswers(ctx context.Context, p *plugin) verdict {
	available := p.healthy()
	n := len(available)
	sizes := []int{1, 2, n / 2, n - 1, n}
	slices.Sort(sizes)
	for _, size := range slices.Compact(sizes) {
		if size < 1 || size > n {
			continue
		}
		for _, include := range slices.Compact([]int{0, 1, size}) {
			t := trial{available: available, include: available[n-include:], size: size}
			response, err := p.prefer(ctx, t)
			if err != nil {
				return failed("%s: %s", t, reason(err, p.timeout))
			}
			if count := len(response.GetContainerResponses()); count != 1 {
				return failed("%s: %d answers to a request with one container", t, count)
			}
			t.got = response.GetContainerResponses()[0].GetDeviceIDs()
			p.trials = append(p.trials, t)
		}
	}
	return passed("%d requests, for up to %d devices", len(p.trials), n)
}

// preferred returns a check of each response. The function f returns what breaks the rule, or "".
func preferred(f func(trial) string) check {
	return preferring(func(_ context.Context, p *plugin) verdict {
		if len(p.trials) == 0 {
			return skipped("no GetPreferredAllocation call was answered")
		}
		for _, t := range p.trials {
			if broken := f(t); broken != "" {
				return failed("%s: %s", t, broken)
			}
		}
		return passed("%d answers", len(p.trials))
	})
}

func preferredSize(t trial) string {
	if len(t.got) != t.size {
		return strconv.Itoa(len(t.got)) + " devices are preferred"
	}
	return ""
}

func preferredAvailable(t trial) string {
	for _, id := range t.got {
		if !slices.Contains(t.available, id) {
			return fmt.Sprintf("%q is not available", id)
		}
	}
	return ""
}

func preferredIncludes(t trial) string {
	for _, id := range t.include {
		if !slices.Contains(t.got, id) {
			return fmt.Sprintf("%q is not included", id)
		}
	}
	return ""
}

func preferredUnique(t trial) string {
	if got := slices.Sorted(slices.Values(t.got)); len(slices.Compact(slices.Clone(got))) < len(got) {
		return fmt.Sprintf("a device is listed twice in %q", got)
	}
	return ""
}

func preferredSame(ctx context.Context, p *plugin) verdict {
	if len(p.trials) == 0 {
		return skipped("no GetPreferredAllocation call was answered")
	}
	for _, t := range p.trials {
		response, err := p.prefer(ctx, t)
		if err != nil || len(response.GetContainerResponses()) != 1 {
			return failed("%s: the first call was answered, the second was not", t)
		}
		again := slices.Sorted(slices.Values(response.GetContainerResponses()[0].GetDeviceIDs()))
		if first := slices.Sorted(slices.Values(t.got)); !slices.Equal(first, again) {
			return failed("%s: first %q, then %q", t, first, again)
		}
	}
	return passed("%d repeated requests have the same answers", len(p.trials))
}

func preferredImpossible(ctx context.Context, p *plugin) verdict {
	available := p.healthy()
	n := len(available)
	requests := map[string]trial{
		"more devices than are available": {available: available, size: n + 1},
	}
	if n > 1 {
		requests["fewer devices than must be included"] = trial{available: available, include: available[:2], size: 1}
	}
	for _, what := range []string{"more devices than are available", "fewer devices than must be included"} {
		t, ok := requests[what]
		if !ok {
			continue
		}
		_, err := p.prefer(ctx, t)
		switch {
		case hung(err) || crashed(err):
			return failed("%s: %s", what, reason(err, p.timeout))
		case err == nil:
			return failed("%s: an answer without an error", what)
		}
	}
	return passed("%d impossible requests, each with an error", len(requests))
}
