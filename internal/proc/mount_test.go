package proc

import (
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

func TestParseMounts(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []Mount // nil is an error
	}{
		"a private mount": {
			"36 35 98:1 /mnt1 /mnt2 rw,noatime - ext3 /dev/root rw,errors=continue\n",
			[]Mount{{ID: 36, Device: "98:1", Root: "/mnt1", Point: "/mnt2"}},
		},
		"a shared mount with more optional fields": {
			`29 1 0:1048575 / /a\040b rw unbindable shared:7 - tmpfs tmpfs rw`,
			[]Mount{{ID: 29, Device: "0:1048575", Root: "/", Point: `/a\040b`, Shared: true}},
		},
		"a slave without a source": {
			"40 29 0:5 / /x rw master:7 propagate_from:2 - tmpfs  rw",
			[]Mount{{ID: 40, Device: "0:5", Root: "/", Point: "/x", Slave: true}},
		},
		"a source that looks like propagation": {
			"40 29 0:5 / /x rw - tmpfs shared:1 rw", []Mount{{ID: 40, Device: "0:5", Root: "/", Point: "/x"}},
		},
		"too few fields": {"36 35 98:1 /mnt1 /mnt2 - ext3 /dev/root rw", nil},
		"no dash":        {"36 35 98:1 /mnt1 /mnt2 rw ext3 /dev/root rw", nil},
		"no mount ID":    {"x 35 98:1 /mnt1 /mnt2 rw - ext3 /dev/root rw", nil},
		"an empty line":  {"\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseMounts(c.text)
			if diff := gocmp.Diff(c.want, got); diff != "" || (err == nil) != (c.want != nil) {
				t.Errorf("error %v, (-want +got)\n%s", err, diff)
			}
		})
	}
}

// parseMounts returns all mounts of a mountinfo.
func parseMounts(text string) ([]Mount, error) {
	var mounts []Mount
	_, err := hasMount(strings.NewReader(text), func(m Mount) bool {
		mounts = append(mounts, m)
		return false
	})
	if err != nil {
		return nil, err
	}
	return mounts, nil
}

func FuzzParseMounts(f *testing.F) {
	f.Add("36 35 98:1 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add("29 1 0:26 / /sys rw shared:7 - sysfs sysfs rw\n40 29 0:5 / /x rw - tmpfs  rw\n")
	f.Fuzz(func(t *testing.T, text string) {
		mounts, err := parseMounts(text)
		if (err == nil && text != "") == (mounts == nil) {
			t.Errorf("mounts %+v, error %v", mounts, err)
		}
	})
}
