package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"holdfast/api/wire"
)

// TestPrintAudit: the timeline is in order and counts from the release.
func TestPrintAudit(t *testing.T) {
	released := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	acked := released.Add(90 * time.Second)
	var out bytes.Buffer
	err := printAudit(&out, &wire.Audit{
		Session:    wire.Session{Class: "agent", State: "ended", Status: "completed", GroupSize: 4, TaskID: "q7"},
		Release:    wire.Release{At: released, BatchSeq: 3, IdempotencyKey: "step-3"},
		Holds:      []wire.Hold{{Reason: "at_cap"}},
		Events:     []wire.Event{{At: released.Add(1500 * time.Millisecond), Kind: "held", Detail: []byte(`{"reason":"at_cap"}`)}},
		Deliveries: []wire.Delivery{{Consumer: "trainer", DeliveredAt: &acked, AcknowledgedAt: &acked}},
	})
	if err != nil {
		t.Fatal(err)
	}
	at := 0
	for _, want := range []string{"class agent", `key "step-3"`, "1 holds", "+1.500s", `{"reason":"at_cap"}`, "+90.000s  delivered", "+90.000s  acknowledged  by trainer"} {
		found := strings.Index(out.String()[at:], want)
		if found < 0 {
			t.Fatalf("%q is missing, or out of order, in\n%s", want, out.String())
		}
		at += found
	}
}
