// A link to a heading inside a closed tab opens that tab: without this the browser cannot scroll to it.
function openTabOfTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const block = target?.closest(".tabbed-block");
  if (!block) return;
  const tabs = block.closest(".tabbed-set");
  const index = Array.from(block.parentElement.children).indexOf(block);
  tabs.querySelectorAll(":scope > input")[index].click();
  tabs.style.scrollMarginTop = "3rem"; // the page's header covers the top
  (target === block.firstElementChild ? tabs : target).scrollIntoView();
}

addEventListener("hashchange", openTabOfTarget);
addEventListener("load", openTabOfTarget);
