package plugin

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func TestAnAnswerThatWasGivenFollowsTheSpec(t *testing.T) {
	a := answers(DeviceSpecs)
	spec := testSpec()
	a.Spec = func() *specs.Spec { return spec }
	s := serverOf(t, gpusOf(1), a)
	env := func() map[string]string {
		resp, err := allocated(s, allocate(uuid(0)))
		must(t, err)
		return resp.GetContainerResponses()[0].GetEnvs()
	}
	before := env()
	if diff := cmp.Diff(before, env()); diff != "" {
		t.Errorf("the same question is answered in another way (-first +second):\n%s", diff)
	}
	next := *spec
	next.ContainerEdits.Env = []string{"NEW=1"}
	spec = &next
	if diff := cmp.Diff(map[string]string{"NEW": "1"}, env()); diff != "" {
		t.Errorf("after the spec has changed (-want +got):\n%s", diff)
	}
}

func TestAnAnswerThatWasGivenIsRefusedWhenTheSpecLacksTheDevices(t *testing.T) {
	a, on := answers(CDICRI), &specsThat{}
	a.Specs = on
	s := serverOf(t, gpusOf(1), a)
	for _, lacks := range []error{nil, errors.New("the spec lacks it"), nil} {
		on.err = lacks
		resp, err := s.Allocate(t.Context(), allocate(uuid(0)))
		if lacks == nil {
			must(t, err)
		} else if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), lacks.Error()) || resp != nil {
			t.Errorf("the answer %v and the error %v, want %v", resp, err, lacks)
		}
	}
}

func TestAnAnswerThatWasGivenFollowsTheExtras(t *testing.T) {
	a := answers(CDICRI)
	extras := testExtras()
	a.Extras = func() []*specs.Spec { return extras }
	s := serverOf(t, gpusOf(1), a)
	for _, c := range []struct {
		extras []*specs.Spec
		want   int // CDI devices
	}{{extras, 4}, {extras[:1], 2}, {nil, 1}, {extras, 4}} {
		extras = c.extras
		resp, err := allocated(s, allocate(uuid(0)))
		must(t, err)
		if got := resp.GetContainerResponses()[0].GetCdiDevices(); len(got) != c.want {
			t.Errorf("with %d extras: %v, want %d names", len(c.extras), got, c.want)
		}
	}
}

func TestOneCallForSeveralContainers(t *testing.T) {
	s := serverOf(t, gpusOf(3), answers(CDICRI))
	want := &v1beta1.AllocateResponse{}
	ask := &v1beta1.AllocateRequest{}
	for i := range 3 {
		one, err := allocated(s, allocate(uuid(i)))
		must(t, err)
		want.ContainerResponses = append(want.ContainerResponses, one.GetContainerResponses()...)
		ask.ContainerRequests = append(ask.ContainerRequests, allocate(uuid(i)).GetContainerRequests()...)
	}
	for range 2 { // the answers for one container are not changed by it
		got, err := allocated(s, ask)
		must(t, err)
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("the answer (-want +got):\n%s", diff)
		}
	}
}

func TestAnswersAreKeptForSomeSetsOfDevices(t *testing.T) {
	s := serverOf(t, gpusOf(10), answers(CDICRI))
	for bits := 1; bits < 1<<10; bits++ {
		var ids []string
		for n := range 10 {
			if bits>>n&1 == 1 {
				ids = append(ids, uuid(n))
			}
		}
		resp, err := allocated(s, allocate(ids...))
		must(t, err)
		if got := len(resp.GetContainerResponses()[0].GetCdiDevices()); got != len(ids) {
			t.Fatalf("%d devices for %v", got, ids)
		}
	}
	if n := len(s.list.Load().answered.of); n == 0 || n > preparedMost {
		t.Errorf("%d answers are kept, want some and at most %d", n, preparedMost)
	}
}
