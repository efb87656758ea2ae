package node

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRemarksAreLoggedWhenTheyBeginChangeAndEnd(t *testing.T) {
	one := remark{key: "a", level: slog.LevelWarn, text: "A is wrong", advice: "repair it"}
	worse := remark{key: "a", level: slog.LevelError, text: "A is worse"}
	note := remark{key: "b", text: "B is so"}
	for name, c := range map[string]struct {
		before, now []remark
		want        string
	}{
		"new":      {nil, []remark{one, note}, "WARN A is wrong; repair it\nINFO B is so\n"},
		"the same": {[]remark{one, note}, []remark{note, one}, ""},
		"changed":  {[]remark{one}, []remark{worse}, "ERROR A is worse\n"},
		"ended":    {[]remark{one, note}, []remark{note}, "INFO no longer the case: A is wrong\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var log strings.Builder
			logRemarks(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: withoutTime})), c.before, c.now)
			got := strings.NewReplacer("level=", "", "msg=", "", `"`, "").Replace(log.String())
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}
