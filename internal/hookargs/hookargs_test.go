package hookargs

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseDecodesArgs(t *testing.T) {
	want := &CreateContainer{
		DriverVersion: "580.126.09",
		CUDAVersion:   "13.0",
		Libraries: []Library{
			{"libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.126.09"},
			{"libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.126.09"},
			{"libvdpau_nvidia.so.1", "/usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.580.126.09"},
		},
		Links:      []Link{{"/usr/lib/x86_64-linux-gnu/libcuda.so", "libcuda.so.1"}},
		DRI:        []DRI{{"0000:1b:00.0", []string{"card1", "renderD129"}}},
		Params:     true,
		EGLProfile: true,
	}
	args := want.Args()
	const grouped = "--libraries=/usr/lib/x86_64-linux-gnu:"
	if !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, grouped) }) {
		t.Errorf("libraries of one directory are not grouped: %q", args)
	}
	got, err := Parse(args)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Parse(Args()) (-want +got):\n%s", diff)
	}
}

func TestParseRefuses(t *testing.T) {
	for name, arg := range map[string]string{
		"an unknown flag":                    "--shell=/bin/sh",
		"a flag without a value":             "--link",
		"a switch with a value":              "--mask-params=0",
		"a link path that climbs":            "--link=/usr/../../etc/passwd::x",
		"a link path that is relative":       "--link=etc/passwd::x",
		"the root as a link path":            "--link=/::x",
		"a link without a target":            "--link=/a::",
		"a library name with a slash":        "--libraries=/usr/lib:../x.so=y",
		"a library file that climbs":         "--libraries=/usr/lib:x.so=..",
		"a library directory that climbs":    "--libraries=/usr/lib/..:x=y",
		"a DRI node with a slash":            "--dri=0000:1b:00.0/../x",
		"a version with letters":             "--driver-version=580.x",
		"a version with an over-long number": "--cuda-version=1.99999999999",
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := Parse([]string{verb, arg}); err == nil {
				t.Errorf("Parse(%q) = %+v, want an error", arg, got)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add("--libraries=/usr/lib:libcuda.so.1=libcuda.so.580", "--link=/a::b")
	f.Add("--dri=0000:1b:00.0/card1", "--driver-version=580.126.09")
	f.Fuzz(func(t *testing.T, a, b string) {
		got, err := Parse([]string{verb, a, b})
		if (got == nil) == (err == nil) {
			t.Fatalf("got %v and error %v, want exactly one", got, err)
		}
		if err != nil {
			return
		}
		again, err := Parse(got.Args())
		if err != nil {
			t.Fatalf("the arguments of Args %q: %v", got.Args(), err)
		}
		if diff := cmp.Diff(got, again); diff != "" {
			t.Errorf("Parse(Args()) (-first +second):\n%s", diff)
		}
	})
}
