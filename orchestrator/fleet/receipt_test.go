package fleet

import "testing"

func TestReceiptsRaiseOneAlarmForPromisesThatAreNeverKept(t *testing.T) {
	var r receipts
	for i := range 3 * alarmReceipts {
		raised, ended := r.add(160, 0, 16)
		if raised != (i == alarmReceipts-1) || ended {
			t.Fatalf("receipt %d: raised %v, ended %v", i, raised, ended)
		}
	}
	if !r.look().Alarm {
		t.Fatal("the alarm does not stand")
	}
	if raised, ended := r.add(160, 144, 16); raised || !ended {
		t.Fatalf("a kept promise: raised %v, ended %v", raised, ended)
	}
	want := Receipts{
		Turns: 3*alarmReceipts + 1, PredictedTokens: 160 * (3*alarmReceipts + 1), CachedTokens: 144, AbsoluteErrorTokens: 160*3*alarmReceipts + 16,
	}
	if got := r.look(); got != want {
		t.Fatalf("got %+v, want %+v", got, want)
	}
}

func TestReceiptsDoNotAlarmOverColdTurns(t *testing.T) {
	var r receipts
	for i := range 10 * alarmReceipts {
		predicted := int64(0)
		if i%alarmReceipts == 0 {
			predicted = 160
		}
		cached := int64(0)
		if i%(5*alarmReceipts) == 0 {
			cached = 16
		}
		if raised, _ := r.add(predicted, cached, 16); raised {
			t.Fatalf("alarm at receipt %d", i)
		}
	}
}
